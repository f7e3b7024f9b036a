"""Agreement of ranks with the same step on the memory of its kernels, their times, and the plan.

Steps are compared as traced, before anything is measured. Workspaces may differ between machines, so every
rank measures, and all plan with the maximum: the limit then holds on each. Times and plan are those of the
first rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from hybridremat.errors import ModelError
from hybridremat.graph.costs.collectives import GatherRate
from hybridremat.graph.joint import JointGraph, Op, Variant
from hybridremat.graph.tracing.signature import edges_text, fingerprint_of
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.plan import Plan
from hybridremat.planning.ranks import ALONE, RankGroup, Ranks
from hybridremat.planning.settings import Settings


def plan_digest(plan: Plan) -> str:
    """A hash of what a plan runs: its ops, in which order, and what they write over."""
    runs = [(part.schedule, part.details and run_key(part.details.graph)) for part in plan.parts or (plan,)]
    return hashlib.sha256(repr(runs).encode()).hexdigest()


def run_key(graph: JointGraph) -> str:
    """A hash of ops, edges and sizes: what schedules of a graph depend on.

    Constants are not in it, nor where a tensor begins in its storage: ranks take different rows of one.
    """
    return fingerprint_of(graph, (op.target for op in graph.ops), map(edges_text, graph.ops))


class RankAgreement:
    """Costs and plans of one model, shared with ``ranks``.

    A step that is traced again later, alone, uses the memory figures that were agreed on, and so gets the
    same plan.

    Attributes
    ----------
    gathers
        What gathers take in each group of ranks, as far as it was measured.
    """

    def __init__(
        self, settings: Settings, ranks: Ranks, gathers: Mapping[str, GatherRate] | None = None
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self.gathers = gathers or {}
        self._group = RankGroup(())
        self._agreed: dict[str, tuple[str, ...]] = {}

    @property
    def alone(self) -> bool:
        """Whether no other rank takes part now."""
        return self._ranks.alone

    @contextmanager
    def among(self, ranks: Ranks) -> Iterator[None]:
        """Share with ``ranks`` inside."""
        self._ranks = ranks
        try:
            yield
        finally:
            self._ranks = ALONE

    def on_memory(self, traced: TracedStep, measured: TracedStep) -> TracedStep:
        """The step with the maximum over the ranks for the bytes of each kernel and value.

        An op overwrites only what all ranks have found that it may, and runs by parts only where all can.
        """
        key, graph = self._key(traced), measured.graph
        self._group = self._ranks.group(key, _memory_text(graph))
        if self._group.ranks is not None:
            self._agreed[key] = self._group.texts
        return replace(measured, graph=_with_maxima(graph, (*self._group.texts, *self._agreed.get(key, ()))))

    def on_times(self, step: TracedStep, measure: Callable[[], TracedStep]) -> TracedStep:
        """The step with the times that the first rank measures."""

        def read(text: str) -> TracedStep:
            timed = zip(step.graph.ops, json.loads(text), strict=True)
            ops = tuple(_timed(op, *times) for op, times in timed)
            return replace(step, graph=replace(step.graph, ops=ops))

        def write(timed: TracedStep) -> str:
            return json.dumps([[op.time, *(each.time for each in op.variants)] for op in timed.graph.ops])

        return self._group.from_leader(measure, write, read)

    def plan_of_leader(self, graph: JointGraph) -> Plan | None:
        """The plan of ``graph`` that the first rank makes; None on that rank, and for a process alone."""
        from hybridremat.plans.codec import plan_from_dict

        if not self._group.follows:
            return None
        plan = plan_from_dict(json.loads(self._group.heard()), Plan)
        if plan.details is None or plan.fingerprint == graph.fingerprint:
            return plan
        own = replace(plan.details.graph, fingerprint=graph.fingerprint)
        details = replace(plan.details, chain=replace(plan.details.chain, graph=own))
        return replace(plan, fingerprint=graph.fingerprint, details=details)

    def tell(self, plan: Plan) -> None:
        """Tell the others the plan that this rank, the first, has made."""
        if not self.alone:
            self._group.tell(json.dumps(plan.to_dict()))

    def _key(self, traced: TracedStep) -> str:
        """A hash of a traced step and of the settings that decide on its plan."""
        request = repr(self._settings.request())
        return hashlib.sha256((run_key(traced.graph) + request).encode()).hexdigest()


def needs_one_plan(settings: Settings) -> bool:
    """Whether ranks, if there are several, have to run the same plan at the same time."""
    if settings.gathers != "plan" or not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1 and distributed.get_backend() != "fake"


def require_planned_together(settings: Settings, agreement: RankAgreement) -> None:
    """Refuse to make a plan on this rank alone.

    Raises
    ------
    ModelError
        If ranks have to run the same plan, and no other one takes part.
    """
    if needs_one_plan(settings) and agreement.alone:
        raise ModelError(
            'gathers="plan" lets the plan say when ranks gather, so all of them have to run the same one. '
            "This step would be planned on one rank alone (its shape is new, what its forward reads has "
            "changed, or across_ranks=False); it has not run. Call hybridremat.wrap or hybridremat.prepare "
            'with inputs of each shape on all ranks, before training, or leave gathers="keep"'
        )


def require_same_step(number: int, device: str) -> None:
    """Refuse a step if other ranks are about to run another one: all ranks call it together.

    ``number`` is its place among those that are planned, which ranks make and use in the same order.

    Raises
    ------
    ModelError
        On all ranks.
    """
    bounds = torch.tensor([number, -number], device=device)
    distributed.all_reduce(bounds, op=distributed.ReduceOp.MAX)
    most, least = bounds.tolist()
    if most != -least:
        raise ModelError(
            'ranks were given inputs of different shapes, and with gathers="plan" all of them run one plan '
            'at a time; the step has not run. Give all ranks inputs of one shape, or wrap with gathers="keep"'
        )


def _memory_text(graph: JointGraph) -> str:
    temps, sizes = [op.temp for op in graph.ops], [value.bytes for value in graph.values]
    variants = [
        [(each.kernel, each.parts, each.temp, each.overwrites) for each in op.variants] for op in graph.ops
    ]
    return json.dumps([temps, sizes, [op.overwrites for op in graph.ops], variants])


def _timed(op: Op, time: int, *variants: int) -> Op:
    ways = tuple(replace(each, time=t) for each, t in zip(op.variants, variants, strict=True))
    return replace(op, time=time, variants=ways)


def _with_maxima(graph: JointGraph, texts: Iterable[str]) -> JointGraph:
    all_temps, all_sizes, overwrites, variants = zip(*map(json.loads, texts), strict=True)
    temps, sizes = _maxima(all_temps), _maxima(all_sizes)

    def fits(op: Op, value: int) -> bool:
        return {sizes[value]} == {sizes[written] for written in op.writes}

    proven = [set[int].intersection(*map(set, group)) for group in zip(*overwrites, strict=True)]
    ops = []
    for op, temp, everywhere, ways in zip(graph.ops, temps, proven, zip(*variants, strict=True), strict=True):
        kept = tuple(v for v in op.overwrites if v in everywhere and fits(op, v))
        agreed = replace(op, temp=temp, overwrites=kept)
        donors = {value for value in op.reads if sizes[value] == sizes[op.writes[0]]} if op.writes else set()
        ops.append(replace(agreed, variants=_variants(agreed, ways, donors)))
    return replace(
        graph,
        ops=tuple(ops),
        values=tuple(replace(value, bytes=size) for value, size in zip(graph.values, sizes, strict=True)),
    )


def _variants(op: Op, ways: Sequence[Sequence[Sequence[Any]]], donors: set[int]) -> tuple[Variant, ...]:
    """The ways to run an op that all ranks have, with the most bytes; none unless all have the same.

    ``donors`` are the values that its result is as large as.
    """
    if not op.variants or len({tuple((kernel, parts) for kernel, parts, *_ in each) for each in ways}) > 1:
        return ()
    own = replace(op.variants[0], temp=op.temp, overwrites=op.overwrites)
    others = [each[1] for each in ways]
    temp = max(workspace for _, _, workspace, _ in others)
    proven = donors.intersection(*(over for *_, over in others))
    over = tuple(value for value in op.variants[1].overwrites if value in proven)
    return own, replace(op.variants[1], temp=temp, overwrites=over)


def _maxima(lists: Iterable[list[int]]) -> list[int]:
    return [max(group) for group in zip(*lists, strict=True)]

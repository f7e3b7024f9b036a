"""What ranks with the same step agree on: the memory of its kernels, their times, and the plan.

Steps are compared as traced, before anything has been measured. A kernel may take other workspace on
another machine, so every rank measures its own, and all plan with the most that any of them found: the limit
then holds on each. Times are those of the first rank, and so is the plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace

from hybridremat.graph.joint import JointGraph
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.plan import Plan
from hybridremat.planning.ranks import RankGroup, Ranks
from hybridremat.planning.settings import Settings
from hybridremat.plans.codec import plan_from_dict


def plan_digest(plan: Plan) -> str:
    """The same for equal plans, however long they took to make."""
    data = plan.to_dict()
    del data["checksum"]
    for part in (data, *data.get("parts", ())):
        del part["timings"]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


class RankAgreement:
    """What the steps of one model agree on with ``ranks``; alone, each keeps its own figures and plans.

    A step that is traced again later, alone, keeps to the memory that was agreed on, and so to its plan.
    """

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self._settings = settings
        self._ranks = ranks
        self._group = RankGroup(())
        self._agreed: dict[str, tuple[str, ...]] = {}

    @property
    def alone(self) -> bool:
        """Whether no other rank has a say now."""
        return self._ranks.alone

    def on_memory(self, traced: TracedStep, measured: TracedStep) -> TracedStep:
        """The step with the most bytes that any rank measured, for each kernel and value."""
        key, graph = self._key(traced), measured.graph
        self._group = self._ranks.group(key, _memory_text(graph))
        if self._group.ranks is not None:
            self._agreed[key] = self._group.texts
        return replace(measured, graph=_with_most(graph, (*self._group.texts, *self._agreed.get(key, ()))))

    def on_times(self, step: TracedStep, measure: Callable[[], TracedStep]) -> TracedStep:
        """The step with the times that the first rank measures."""

        def read(text: str) -> TracedStep:
            timed = zip(step.graph.ops, json.loads(text), strict=True)
            return replace(step, graph=replace(step.graph, ops=tuple(replace(op, time=t) for op, t in timed)))

        def write(timed: TracedStep) -> str:
            return json.dumps([op.time for op in timed.graph.ops])

        return self._group.from_leader(measure, write, read)

    def on_plan(self, make: Callable[[], Plan]) -> Plan:
        """The plan that the first rank makes."""
        return self._group.from_leader(
            make, lambda plan: json.dumps(plan.to_dict()), lambda text: plan_from_dict(json.loads(text), Plan)
        )

    def _key(self, traced: TracedStep) -> str:
        """The key of a traced step and of what is asked for it."""
        request = repr(self._settings.deciding())
        return hashlib.sha256((traced.graph.fingerprint + request).encode()).hexdigest()


def _memory_text(graph: JointGraph) -> str:
    return json.dumps([[op.temp for op in graph.ops], [value.bytes for value in graph.values]])


def _with_most(graph: JointGraph, texts: Iterable[str]) -> JointGraph:
    temps, sizes = (_most(lists) for lists in zip(*map(json.loads, texts), strict=True))
    return replace(
        graph,
        ops=tuple(replace(op, temp=temp) for op, temp in zip(graph.ops, temps, strict=True)),
        values=tuple(replace(value, bytes=size) for value, size in zip(graph.values, sizes, strict=True)),
    )


def _most(lists: Iterable[list[int]]) -> list[int]:
    return [max(group) for group in zip(*lists, strict=True)]

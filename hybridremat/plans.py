"""A plan: schedule, figures and the decisions block by block, as data. ``print(plan)`` shows it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from typing import Any

from hybridremat.demands import Demands
from hybridremat.graph.joint import JointGraph, Phase, Schedule
from hybridremat.graph.memory import step_memory
from hybridremat.planner import Candidate, ChainPlan, Planning
from hybridremat.sequence import BlockDecision, block_decisions

SCHEMA = 2  # version of Plan.to_dict


@dataclass(frozen=True)
class ValueRecord:
    """A value of the model by name, and what becomes of it in this plan."""

    name: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str
    module: str


@dataclass(frozen=True)
class PlannedBlock:
    """What the plan does with one block.

    Attributes
    ----------
    index
        Its place in the chain.
    modules
        Paths of the modules that its forward ops come from, in order.
    forward_ops, backward_ops
        How many kernels it has in each phase.
    option, option_count, solo
        Number of the option that its backward uses, among how many; ``solo``: its output is not made
        again and nothing of it was saved.
    forward_runs
        How often its whole forward runs (1: no re-run).
    saved
        Values alive between its forward and its backward.
    recomputed
        Values made more than once, with the number of extra times.
    saved_bytes, forward_peak, backward_peak
        Bytes of the option, without what other blocks hold.
    forward_time, extra_time
        Nanoseconds of its forward, and of everything that runs more than once.
    """

    index: int
    modules: tuple[str, ...]
    forward_ops: int
    backward_ops: int
    option: int | None
    option_count: int
    solo: bool
    forward_runs: int
    saved: tuple[ValueRecord, ...]
    recomputed: tuple[tuple[ValueRecord, int], ...]
    saved_bytes: int
    forward_peak: int
    backward_peak: int
    forward_time: int
    extra_time: int


@dataclass(frozen=True)
class GraphBreak:
    """Where the model's graph breaks, why, and the bytes that are handed across and so kept to the end."""

    place: str
    reason: str
    crossing_bytes: int


@dataclass(frozen=True)
class Plan:
    """A plan for one model, input and limit.

    Attributes
    ----------
    memory_limit
        Bytes of step memory that the plan promises to stay under; None if only an overhead was asked.
    asked_limit
        Bytes that were asked for: more than nothing fits, and ``memory_limit`` is what the least plan needs,
        if ``on_infeasible="least"``; else the same as ``memory_limit``.
    reserve
        Bytes of the limit kept free, once the forward is over, for the caller's own code.
    forwards
        How many forwards may wait for their backward at one time.
    predicted_peak
        Exact step memory of the emitted graphs in bytes, without the caller's own code.
    needed
        Bytes that the step takes at most with the caller's code and further forwards
        (:mod:`hybridremat.demands`); the same as ``predicted_peak`` without.
    plain_peak, least_peak
        Bytes: the plain step's, and the least ``memory_limit`` that is feasible with ``reserve`` and
        ``forwards``.
    overhead, extra_flops
        Fractions of the plain step's time (by the cost model) and flops.
    saved_bytes
        Bytes alive between forward and backward.
    blocks
        Decisions, block by block.
    parts
        For a step of several graphs, the plan of each distinct one; ``schedule`` is then empty.
    breaks
        The graph breaks between them, in the order of the forward.
    timings
        Seconds that planning took, by stage.
    cost_model
        The source of times.
    reused_options
        Whether some blocks' options were those of another input shape, counted anew for this one: quick to
        make, exact in memory, and perhaps a little slower than a plan of its own.
    fingerprint
        Identifies the joint graph: ops, edges, bytes and flops.
    schedule
        Every op execution, recomputations included.
    """

    memory_limit: int | None
    asked_limit: int | None
    reserve: int
    forwards: int
    predicted_peak: int
    needed: int
    plain_peak: int
    least_peak: int
    overhead: float
    extra_flops: float
    saved_bytes: int
    blocks: tuple[PlannedBlock, ...]
    cost_model: str
    fingerprint: str
    schedule: Schedule
    reused_options: bool = False
    parts: tuple[Plan, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    timings: dict[str, float] = field(compare=False, default_factory=dict)

    def __str__(self) -> str:
        from hybridremat.report import plan_tables, render

        out = StringIO()
        render(plan_tables(self), out)
        return out.getvalue().rstrip("\n")

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types, with the version of the schema."""
        data = asdict(self)
        return {"schema": SCHEMA, **json.loads(json.dumps(data))}

    @property
    def planning_seconds(self) -> float:
        """Seconds that planning took in all."""
        return sum(self.timings.values())

    def with_timings(self, timings: dict[str, float]) -> Plan:
        """The same plan with more stages timed."""
        return replace(self, timings={**self.timings, **timings})


def fingerprint(graph: JointGraph) -> str:
    """A hash of what a plan depends on: ops, edges, phases, bytes, flops and temporaries."""
    digest = hashlib.sha256()
    for op in graph.ops:
        digest.update(
            repr((op.target, op.phase.value, op.reads, op.writes, op.flops, op.temp, op.random)).encode()
        )
    for value in graph.values:
        digest.update(repr((value.bytes, value.producer, value.shape, value.dtype)).encode())
    for group in (graph.held_outputs, graph.released_outputs, graph.gradients):
        digest.update(repr(sorted(group)).encode())
    return digest.hexdigest()[:32]


def make_plan(
    planning: Planning,
    chosen: Candidate,
    *,
    limit: int | None,
    asked: int | None,
    demands: Demands,
    cost_model: str,
) -> Plan:
    """The plan that a point of the frontier stands for."""
    graph, point = planning.graph, chosen.point
    memory = step_memory(graph, point.schedule)
    return Plan(
        memory_limit=limit,
        asked_limit=asked,
        reserve=demands.reserve,
        forwards=demands.forwards,
        predicted_peak=point.peak,
        needed=planning.needs(chosen, demands),
        plain_peak=planning.plain.peak,
        least_peak=planning.needs(planning.least(demands), demands),
        overhead=planning.overhead(point),
        extra_flops=planning.extra_flops(point),
        saved_bytes=memory.saved,
        blocks=()
        if chosen.chain_index is None
        else planned_blocks(planning.chains[chosen.chain_index], point.schedule, point.decisions),
        cost_model=cost_model,
        fingerprint=fingerprint(graph),
        schedule=point.schedule,
        reused_options=planning.reused_options,
        timings=dict(planning.timings),
    )


def planned_blocks(
    chain_plan: ChainPlan, schedule: Schedule, decisions: Iterable[object]
) -> tuple[PlannedBlock, ...]:
    """The decisions of a schedule, sorted by block."""
    graph = chain_plan.chain.graph
    runs = Counter(schedule.steps)
    crossing = _crossing(graph, schedule)
    by_block = {d.block: d for d in block_decisions(tuple(decisions))}  # type: ignore[arg-type]
    return tuple(
        _planned_block(chain_plan, index, by_block.get(index), runs, crossing)
        for index in range(len(chain_plan.chain.blocks))
    )


def _crossing(graph: JointGraph, schedule: Schedule) -> frozenset[int]:
    """Values whose forward version the backward reads."""
    made: set[int] = set()
    crossing: set[int] = set()
    for op in schedule.steps[schedule.num_forward :]:
        crossing.update(
            v for v in graph.ops[op].reads if v not in made and graph.values[v].producer is not None
        )
        made.update(graph.ops[op].writes)
    return frozenset(crossing)


def _planned_block(
    plan: ChainPlan,
    index: int,
    decision: BlockDecision | None,
    runs: Counter[int],
    crossing: frozenset[int],
) -> PlannedBlock:
    graph, block = plan.chain.graph, plan.chain.blocks[index]
    options = plan.option_sets[index]
    family = options.solo if decision is not None and decision.solo else options.options
    option = family[decision.option] if decision is not None else None
    made = [graph.ops[op] for op in (*block.forward, *block.optional)]
    saved = [_record(graph, v) for op in made for v in op.writes if v in crossing]
    again = [(_record(graph, op.writes[0]), runs[op.id] - 1) for op in made if runs[op.id] > 1 and op.writes]
    return PlannedBlock(
        index=index,
        modules=tuple(dict.fromkeys(graph.ops[op].module for op in block.forward if graph.ops[op].module)),
        forward_ops=len(block.forward),
        backward_ops=len(block.backward),
        option=decision.option if decision is not None else None,
        option_count=len(family),
        solo=decision.solo if decision is not None else False,
        forward_runs=decision.forward_runs if decision is not None else 1,
        saved=tuple(saved),
        recomputed=tuple(again),
        saved_bytes=sum(record.bytes for record in saved),
        forward_peak=option.forward_peak if option is not None else 0,
        backward_peak=option.backward_peak if option is not None else 0,
        forward_time=sum(graph.ops[op].time for op in block.forward),
        extra_time=sum(
            op.time * (runs[op.id] - 1) for op in made if op.phase is not Phase.BACKWARD and runs[op.id]
        ),
    )


def _record(graph: JointGraph, value: int) -> ValueRecord:
    item = graph.values[value]
    op = graph.producer(value)
    assert op is not None
    return ValueRecord(item.name, item.bytes, item.shape, item.dtype, op.target, op.module)

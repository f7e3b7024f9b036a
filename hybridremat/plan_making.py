"""From a point of the frontier to the plan that people see: figures, and decisions block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hybridremat.blocks.problem import bind_block
from hybridremat.blocks.types import Option
from hybridremat.demands import Demands
from hybridremat.graph.joint import JointGraph, Phase, Schedule
from hybridremat.graph.memory import step_memory
from hybridremat.plan_records import (
    FrontierPoint,
    Origin,
    PlanDetails,
    PlannedBlock,
    Request,
    ValueRecord,
)
from hybridremat.planner import Candidate, ChainPlan, Planning
from hybridremat.plans import Plan
from hybridremat.sequence import BlockDecision, SchedulePoint, block_decisions, per_block_checkpoint
from hybridremat.undecided import option_of_schedule


def frontier_point(planning: Planning, point: SchedulePoint) -> FrontierPoint:
    """The figures of a schedule."""
    return FrontierPoint(point.peak, planning.overhead(point), planning.extra_flops(point))


def frontier_points(planning: Planning) -> tuple[FrontierPoint, ...]:
    """The figures of every point of the frontier, by rising peak."""
    return tuple(frontier_point(planning, candidate.point) for candidate in planning.candidates)


def checkpointed(planning: Planning) -> FrontierPoint | None:
    """What checkpointing each block by itself takes, on the chain of fewest blocks; None without blocks."""
    chains = [plan for plan in planning.chains if plan.chain.blocks]
    if not chains:
        return None
    plan = min(chains, key=lambda each: len(each.chain.blocks))
    return frontier_point(planning, per_block_checkpoint(plan.chain, plan.bindings, plan.option_sets))


def make_plan(
    planning: Planning,
    chosen: Candidate,
    *,
    limit: int | None,
    asked: int | None,
    demands: Demands,
    cost_model: str,
    origin: Origin | None = None,
    request: Request | None = None,
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
        fingerprint=graph.fingerprint,
        schedule=point.schedule,
        origin=origin or Origin(),
        request=request or Request(),
        details=_details(planning, chosen),
        reused_options=planning.reused_options,
        pins=planning.pins,
        timings=dict(planning.timings),
    )


def _details(planning: Planning, chosen: Candidate) -> PlanDetails | None:
    if chosen.chain_index is None:
        return None
    plan = planning.chains[chosen.chain_index]
    distinct = tuple(dict.fromkeys(plan.option_sets))
    number = {options: index for index, options in enumerate(distinct)}
    return PlanDetails(
        chain=plan.chain,
        option_sets=distinct,
        option_set_of=tuple(number[options] for options in plan.option_sets),
        decisions=chosen.point.decisions,
        frontier=frontier_points(planning),
        checkpointed=checkpointed(planning),
    )


def planned_blocks(
    chain_plan: ChainPlan, schedule: Schedule, decisions: Iterable[object]
) -> tuple[PlannedBlock, ...]:
    """The decisions of a schedule, sorted by block."""
    graph = chain_plan.chain.graph
    runs = Counter(schedule.steps)
    crossing = _crossing(graph, schedule)
    by_block = {d.block: d for d in block_decisions(tuple(decisions))}  # type: ignore[arg-type]

    def option(index: int) -> Option | None:
        decision = by_block.get(index)
        if decision is None:
            return option_of_schedule(bind_block(chain_plan.chain, index), schedule, crossing)
        options = chain_plan.option_sets[index]
        return (options.solo if decision.solo else options.options)[decision.option]

    return tuple(
        _planned_block(chain_plan, index, by_block.get(index), option(index), runs, crossing)
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
    option: Option | None,
    runs: Counter[int],
    crossing: frozenset[int],
) -> PlannedBlock:
    graph, block = plan.chain.graph, plan.chain.blocks[index]
    read = {v for op in graph.ops for v in op.reads}
    options = plan.option_sets[index]
    family = options.solo if decision is not None and decision.solo else options.options
    made = [graph.ops[op] for op in (*block.forward, *block.optional)]
    saved = [_record(graph, v) for op in made for v in op.writes if v in crossing]
    again = [
        (_record(graph, v), runs[op.id] - 1)
        for op in made
        for v in op.writes
        if runs[op.id] > 1 and (v == op.writes[0] or v in read)
    ]
    shown = {record.id for record in (*saved, *(record for record, _ in again))}
    freed = [_record(graph, v) for op in made for v in op.writes if runs[op.id] and v not in shown]
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
        freed=tuple(freed),
    )


def _record(graph: JointGraph, value: int) -> ValueRecord:
    item = graph.values[value]
    op = graph.producer(value)
    assert op is not None
    return ValueRecord(
        name=item.name,
        bytes=item.bytes,
        shape=item.shape,
        dtype=item.dtype,
        op=op.target,
        module=op.module,
        source=op.source,
        time=op.time if value == op.writes[0] else 0,
        id=value,
    )

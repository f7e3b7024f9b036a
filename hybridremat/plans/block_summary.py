"""What a schedule does with each block, and the figures of blocks without a decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hybridremat.blocks.problem import bind_blocks
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import BlockBinding, Option, OptionSet
from hybridremat.graph.joint import JointGraph, Phase, Schedule
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.plans.records import PlannedBlock, ValueRecord
from hybridremat.sequence.decisions import BlockDecision, Decision, block_decisions


@dataclass(frozen=True)
class _Executions:
    """The executions of each op, and the values that any op reads, that cross into the backward, or move."""

    graph: JointGraph
    runs: Counter[int]
    crossing: frozenset[int]
    read: frozenset[int]
    moved: frozenset[int]

    @staticmethod
    def of(graph: JointGraph, schedule: Schedule) -> _Executions:
        read = frozenset(value for op in graph.ops for value in op.reads)
        moved = frozenset(move.value for move in schedule.moves)
        return _Executions(graph, Counter(schedule.steps), _crossing(graph, schedule), read, moved)


def planned_blocks(
    chain: Chain, option_sets: Sequence[OptionSet], schedule: Schedule, decisions: Iterable[Decision]
) -> tuple[PlannedBlock, ...]:
    """What a schedule does with each block of a chain; ``option_sets`` has one entry a block."""
    ran = _Executions.of(chain.graph, schedule)
    decided = {decision.block: decision for decision in block_decisions(tuple(decisions))}
    bindings = bind_blocks(chain) if len(decided) < len(chain.blocks) else ()

    def planned(index: int) -> PlannedBlock:
        decision = decided.get(index)
        if decision is None:
            option = option_of_schedule(bindings[index], schedule, ran.crossing)
            return _planned_block(ran, chain, index, None, option, option_sets[index].options)
        family = option_sets[index].solo if decision.solo else option_sets[index].options
        return _planned_block(ran, chain, index, decision, family[decision.option], family)

    return tuple(planned(index) for index in range(len(chain.blocks)))


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
    ran: _Executions,
    chain: Chain,
    index: int,
    decision: BlockDecision | None,
    option: Option | None,
    family: Sequence[Option],
) -> PlannedBlock:
    graph, runs, block = ran.graph, ran.runs, chain.blocks[index]
    made = [graph.ops[op] for op in (*block.forward, *block.optional)]
    crossing = [_record(graph, v) for op in made for v in op.writes if v in ran.crossing]
    saved = [record for record in crossing if record.id not in ran.moved]
    again = [
        (_record(graph, v), runs[op.id] - 1)
        for op in made
        for v in op.writes
        if runs[op.id] > 1 and (v == op.writes[0] or v in ran.read)
    ]
    shown = {record.id for record in (*crossing, *(record for record, _ in again))}
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
        moved=tuple(record for record in crossing if record.id in ran.moved),
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


def option_of_schedule(binding: BlockBinding, schedule: Schedule, crossing: Collection[int]) -> Option | None:
    """The option, with exact figures, by which a schedule runs a block; None if it needs other blocks.

    ``crossing``: values (ids of the graph) whose forward version the backward reads. A block needs others if
    it reads what they recompute.
    """
    ops = {op: c for c, op in enumerate(binding.ops)}
    step_of = {op: j for j, group in enumerate(binding.steps) for op in group}
    ahead = frozenset(schedule.steps[: schedule.num_forward])
    again: list[list[int]] = [[] for _ in binding.steps]
    waiting: list[int] = []
    for op in schedule.steps[schedule.num_forward :]:
        if op in ops:
            waiting.append(ops[op])
        elif op in step_of:
            again[step_of[op]] += waiting
            waiting = []
    problem = binding.problem
    try:
        return simulate_option(
            problem,
            [d for d, value in enumerate(binding.values) if value in crossing],
            [c for op, c in ops.items() if op in ahead and problem.ops[c].optional],
            again,
        )
    except ValueError:
        return None

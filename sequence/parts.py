"""Which ops of a schedule have to run by parts, so that it stays under its own peak."""

from __future__ import annotations

from dataclasses import replace

from hybridremat.graph.joint import JointGraph, by_parts
from hybridremat.graph.memory import MemorySimulator, schedule_time
from hybridremat.sequence.frontier import Needs, SchedulePoint


def parts_for_nothing(graph: JointGraph) -> JointGraph:
    """The graph with all ops run by parts that can be, in the time of their own kernels."""
    ops = by_parts(graph).ops
    return replace(graph, ops=tuple(replace(op, time=op.runs_alone.time) for op in ops))


def with_fewest_parts(graph: JointGraph, point: SchedulePoint, needs: Needs) -> SchedulePoint:
    """A point whose ops all run by parts where they can, with own kernels where these fit as well.

    ``graph`` is that of :func:`parts_for_nothing`. An op's own kernel takes more while it runs, and nothing
    at any other time, so each is decided alone. One that is faster by parts stays so.
    """
    able = {op.id for op in graph.ops if op.variant}
    simulate = MemorySimulator(graph)
    profile = simulate(point.schedule).profile
    over = simulate.overwritten(point.schedule)
    parted = set()
    for now, op_id in enumerate(point.schedule.steps):
        if op_id not in able or op_id in parted:
            continue
        op = graph.ops[op_id]
        own, parts = op.variants
        more = own.temp - parts.temp
        if now in over and over[now] not in own.overwrites:
            more += graph.values[over[now]].bytes
        if own.time > parts.time or profile[now] + more > point.peak:
            parted.add(op_id)
    chosen = by_parts(graph, parted)
    memory = MemorySimulator(chosen)(point.schedule)
    if memory.peak > point.peak:
        chosen, parted, memory = by_parts(graph), able, simulate(point.schedule)
    return replace(
        point,
        peak=memory.peak,
        time=schedule_time(chosen, point.schedule),
        needs=needs(point.schedule, memory),
        parted=frozenset(parted),
    )

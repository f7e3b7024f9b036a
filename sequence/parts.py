"""Which ops of a schedule have to run by parts, so that it stays under its own peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hybridremat.graph.joint import JointGraph, by_parts
from hybridremat.graph.memory import MemorySimulator, schedule_time
from hybridremat.sequence.frontier import Needs, SchedulePoint

BETWEEN: Final = 4
"""Points of one schedule above the first, the last one with no op by parts that is slower so."""


def parts_for_nothing(graph: JointGraph) -> JointGraph:
    """The graph with all ops run by parts that can be, in the time of their own kernels."""
    ops = by_parts(graph).ops
    return replace(graph, ops=tuple(replace(op, time=op.runs_alone.time) for op in ops))


def with_parts_chosen(graph: JointGraph, point: SchedulePoint, needs: Needs) -> Iterator[SchedulePoint]:
    """Points of one schedule whose ops all run by parts where they can: with as few parts as peaks allow.

    ``graph`` is that of :func:`parts_for_nothing`. The first point is under the schedule's own peak. If parts
    take time there, others follow, between it and the peak of the ops' own kernels alone.
    """
    first = with_fewest_parts(graph, point, needs, point.peak)
    yield first
    if first.time > point.time:
        most = MemorySimulator(by_parts(graph, ()))(point.schedule).peak
        for step in range(1, BETWEEN + 1):
            limit = first.peak + (most - first.peak) * step // BETWEEN
            yield with_fewest_parts(graph, point, needs, limit)


def with_fewest_parts(graph: JointGraph, point: SchedulePoint, needs: Needs, limit: int) -> SchedulePoint:
    """A point with the ops' own kernels wherever they fit under a limit (bytes), not below its own peak.

    An op's own kernel takes more while it runs, and nothing at any other time, so each is decided alone. One
    that is faster by parts stays so.
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
        if own.time > parts.time or profile[now] + more > limit:
            parted.add(op_id)
    chosen = by_parts(graph, parted)
    memory = MemorySimulator(chosen)(point.schedule)
    if memory.peak > limit:
        chosen, parted = by_parts(graph), able
        memory = simulate(point.schedule)
    return replace(
        point,
        peak=memory.peak,
        time=schedule_time(chosen, point.schedule),
        needs=needs(point.schedule, memory),
        parted=frozenset(parted),
    )

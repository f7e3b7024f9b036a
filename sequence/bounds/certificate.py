"""Bounds of a step: the time that no schedule beats under a limit, and the bytes that none goes below.

Schedules are those of :mod:`hybridremat.graph.memory`: any op, forward, optional or backward, any number of
times where it may be repeated, in any order that its inputs allow, forward ops in the forward first. Small
graphs are searched, so that the bound is the optimum; others are relaxed to a linear program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hybridremat.graph.joint import JointGraph, Op, Phase, Schedule, Variant, plain_schedule
from hybridremat.graph.memory import MemorySimulator
from hybridremat.sequence.bounds.linear_program import ITERATIONS, LinearProgram
from hybridremat.sequence.bounds.moments import MOMENTS, Moments, choose_moments, needed_ops
from hybridremat.sequence.bounds.relaxation import PhaseLimits, peak_program, time_program
from hybridremat.sequence.bounds.search import least_time


@dataclass(frozen=True)
class BoundEffort:
    """How hard a bound is looked for: moments, and iterations of the solver."""

    moments: int = MOMENTS
    iterations: int = ITERATIONS


THOROUGH: Final = BoundEffort()

QUICK: Final = BoundEffort(moments=10, iterations=1_000)
"""Half a second where the whole effort takes two; where few moments say enough, for the same bound."""


def time_bound(
    graph: JointGraph, limits: PhaseLimits, schedule: Schedule, effort: BoundEffort = THOROUGH
) -> int:
    """Nanoseconds that no schedule under these limits beats.

    ``schedule`` is a good one: moments are where it takes most memory.
    """
    if (found := least_time(graph, limits)) is not None:
        return found
    bound = _bound(graph, schedule, lambda at: time_program(graph, at, limits), effort)
    return max(time_once(graph), bound)


def least_peak_bound(graph: JointGraph, schedule: Schedule) -> int:
    """Bytes of step memory that no schedule goes below; ``schedule`` is one of little memory.

    Moments are where it takes most, and where the plain step does: now these and now those prove more.
    """
    known = MemorySimulator(graph)(schedule).peak
    going_by = {schedule, plain_schedule(graph)}
    proven = (_bound(graph, each, lambda at: peak_program(graph, at, known)) for each in going_by)
    return max(_most_alone(graph), *proven)


def time_once(graph: JointGraph) -> int:
    """Nanoseconds of what runs in any schedule, each op once and in its fastest way."""
    return sum(min(way.time for way in graph.ops[op].ways) for op in needed_ops(graph))


def _most_alone(graph: JointGraph) -> int:
    """Bytes that one op takes, whatever else is alive."""
    return max(_bytes_alone(graph, graph.ops[op]) for op in needed_ops(graph))


def _bytes_alone(graph: JointGraph, op: Op) -> int:
    values = graph.values
    read = {value for value in op.reads if values[value].producer is not None}
    tangents = sum(value.bytes for value in values if value.tangent) if op.phase is Phase.BACKWARD else 0
    alive = tangents + sum(values[value].bytes for value in read.union(op.writes))

    def taken(way: Variant) -> int:
        return way.temp - max((values[value].bytes for value in read.intersection(way.overwrites)), default=0)

    return alive + min(map(taken, op.ways))


def _bound(
    graph: JointGraph,
    schedule: Schedule,
    program: Callable[[Moments], LinearProgram],
    effort: BoundEffort = THOROUGH,
) -> int:
    profile = MemorySimulator(graph)(schedule).profile
    level = [0] * len(graph.ops)
    for op, size in zip(schedule.steps, profile, strict=True):
        level[op] = max(level[op], size)
    return program(choose_moments(graph, level, effort.moments)).lower_bound(effort.iterations)

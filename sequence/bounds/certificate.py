"""Bounds of a step: the time that no schedule beats under a limit, and the bytes that none goes below.

Schedules are those of :mod:`hybridremat.graph.memory`: any op, forward, optional or backward, any number of
times where it may be repeated, in any order that its inputs allow, forward ops in the forward first. Small
graphs are searched, so that the bound is the optimum; others are relaxed to a linear program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hybridremat.graph.joint import JointGraph, Op, Phase, Schedule, Variant, plain_schedule
from hybridremat.graph.memory import MemorySimulator, schedule_time
from hybridremat.sequence.bounds.integer import integer_bound
from hybridremat.sequence.bounds.linear_program import ITERATIONS, LinearProgram
from hybridremat.sequence.bounds.moments import MOMENTS, Moments, choose_moments, needed_ops
from hybridremat.sequence.bounds.relaxation import PhaseLimits, peak_program, time_program
from hybridremat.sequence.bounds.search import least_time
from hybridremat.sequence.judge import Judge


@dataclass(frozen=True)
class BoundEffort:
    """How hard a bound is looked for.

    Attributes
    ----------
    moments, iterations
        Moments of the relaxation, and iterations of its solver.
    integers
        Whether a bound of time that is not near is looked for in whole numbers as well, by CP-SAT.
    """

    moments: int = MOMENTS
    iterations: int = ITERATIONS
    integers: bool = False


THOROUGH: Final = BoundEffort(integers=True)

MANY: Final = BoundEffort()
"""For many points: without the search in whole numbers."""

QUICK: Final = BoundEffort(moments=10, iterations=1_000)
"""Half a second where all moments take two; where few of them say enough, for the same bound."""

NEAR: Final = 0.02
"""The share of a schedule's time within which a bound is near enough."""

INTEGER_EFFORT: Final = 10.0
"""Deterministic seconds of CP-SAT, about as many on the clock; three times as many prove 0.1 points more."""

INTEGER_MOMENTS: Final = 16
"""Moments of the relaxation in whole numbers: what CP-SAT proves about more of them is less, in its time."""


def time_bound(
    graph: JointGraph, limits: PhaseLimits, schedule: Schedule, effort: BoundEffort = THOROUGH
) -> int:
    """Nanoseconds that no schedule under these limits beats.

    Of a linear program it is exact arithmetic; in whole numbers, what CP-SAT says it proved.
    ``schedule`` is a good one: moments are where it takes most memory.
    """
    if (found := least_time(graph, limits)) is not None:
        return found

    def program(moments: int) -> LinearProgram:
        return time_program(graph, moments_of(graph, schedule, moments), limits)

    bound = max(time_once(graph), program(effort.moments).lower_bound(effort.iterations))
    if not effort.integers or bound >= (1 - NEAR) * schedule_time(graph, schedule):
        return bound
    return max(bound, integer_bound(program(INTEGER_MOMENTS), INTEGER_EFFORT))


def bound_under(judge: Judge, limit: int, schedule: Schedule, effort: BoundEffort = THOROUGH) -> int:
    """Nanoseconds that no schedule beats that needs at most ``limit`` bytes."""
    return time_bound(judge.graph, PhaseLimits(*judge.phase_limits(limit)), schedule, effort)


def least_peak_bound(graph: JointGraph, schedule: Schedule, effort: BoundEffort = THOROUGH) -> int:
    """Bytes of step memory that no schedule goes below; ``schedule`` is one of little memory.

    Moments are where it takes most, and where the plain step does: now these and now those prove more.
    """
    known = MemorySimulator(graph)(schedule).peak
    going_by = {schedule, plain_schedule(graph)}
    programs = (peak_program(graph, moments_of(graph, each, effort.moments), known) for each in going_by)
    return max(heaviest_op(graph)[1], *(each.lower_bound(effort.iterations) for each in programs))


def time_once(graph: JointGraph) -> int:
    """Nanoseconds of what runs in any schedule, each op once and in its fastest way."""
    return sum(min(way.time for way in graph.ops[op].ways) for op in needed_ops(graph))


def heaviest_op(graph: JointGraph) -> tuple[Op, int]:
    """The op that takes most with what it reads and writes, and these bytes: no schedule goes below them."""
    alone = {op: _bytes_alone(graph, graph.ops[op]) for op in needed_ops(graph)}
    heaviest = max(alone, key=lambda op: (alone[op], -op))
    return graph.ops[heaviest], alone[heaviest]


def _bytes_alone(graph: JointGraph, op: Op) -> int:
    values = graph.values
    read = {value for value in op.reads if values[value].producer is not None}
    tangents = sum(value.bytes for value in values if value.tangent) if op.phase is Phase.BACKWARD else 0
    alive = tangents + sum(values[value].bytes for value in read.union(op.writes))

    def taken(way: Variant) -> int:
        return way.temp - max((values[value].bytes for value in read.intersection(way.overwrites)), default=0)

    return alive + min(map(taken, op.ways))


def moments_of(graph: JointGraph, schedule: Schedule, count: int) -> Moments:
    """Moments where a schedule takes most memory, at most ``count``."""
    profile = MemorySimulator(graph)(schedule).profile
    level = [0] * len(graph.ops)
    for op, size in zip(schedule.steps, profile, strict=True):
        level[op] = max(level[op], size)
    return choose_moments(graph, level, count)

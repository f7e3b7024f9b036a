"""Exchanges as a search: where they begin, and how hard they try.

They begin at the fastest schedule under the limit, at those that are a little faster and need a little more,
and at what exchanges lead to under two higher limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hybridremat.graph.joint import Schedule
from hybridremat.sequence.exchange.search import Exchange, simulations_for
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.parts import judge_of
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.search import Goal, Level

BEYOND: Final = 24
"""Schedules beyond a limit that exchanges try to bring under it."""

BEYOND_QUICKLY: Final = 6
"""The same, where there are many limits."""

ABOVE: Final = (0.3, 0.1)
"""Higher limits from which exchanges come down to the limit: shares of the way to the plain step's peak."""

QUICK: Final = 265
"""Simulated schedules at one point, where there are many."""

EXECUTIONS_A_SECOND: Final = 250_000
"""Executions that exchanges simulate on a nominal core."""

NEAR: Final = 0.05
"""What is near a limit: a share of it, beyond it. What is below is slower."""


def higher_limits(limit: int, plain_peak: int) -> tuple[int, ...]:
    """The limits in bytes from which exchanges come down to a limit, the highest first."""
    return tuple(limit + int(share * (plain_peak - limit)) for share in ABOVE)


def search_ranges(limit: int, plain_peak: int) -> tuple[tuple[int, int], ...]:
    """The ranges of bytes in which exchanges under a limit begin: just beyond it, and at the higher limits.

    Bytes as the limit counts them. For a limit beyond the plain peak the higher ones are lower; a plan is
    found all the same, since the plain step then fits.
    """
    higher = higher_limits(limit, plain_peak)
    return (limit, int(limit * (1 + NEAR))), *((each, each) for each in higher)


def exchanges(judge: Judge, pool: Pool, goal: Goal) -> Pool:
    """What exchanges lead to under the limit (:class:`~hybridremat.sequence.search.Search`).

    Nothing once the deadline has passed, and nothing from a schedule without blocks.
    """
    start = pool.under(goal.limit)
    if start is None or goal.level is Level.REST:
        return pool
    quick = goal.level is Level.QUICK
    beyond = _from_above(judge, pool, start, goal) if goal.beyond is None else list(goal.beyond)
    beyond += _next(pool, start, BEYOND_QUICKLY if quick else BEYOND)
    simulations = QUICK if quick else simulations_for(start.schedule)
    return pool.with_points(_exchanged(judge, start, beyond, goal, simulations))


def _from_above(judge: Judge, pool: Pool, start: SchedulePoint, goal: Goal) -> list[SchedulePoint]:
    """What exchanges lead to quickly under some higher limits, each from the one before."""
    last: list[SchedulePoint] = []
    for higher in higher_limits(goal.limit, goal.plain_peak):
        fitting = pool.under(higher)
        if fitting is not None and fitting != start:
            beyond = [*last, *_next(pool, fitting, BEYOND_QUICKLY)]
            last = _exchanged(judge, fitting, beyond, replace(goal, limit=higher), QUICK)[:1]
    return last


def _next(pool: Pool, start: SchedulePoint, count: int) -> list[SchedulePoint]:
    """Of the ``count`` schedules that are a little faster, and need a little more, those of blocks."""
    return [each for each in pool.faster(start.time, count) if each.chain is not None]


def _exchanged(
    judge: Judge, start: SchedulePoint, beyond: Sequence[SchedulePoint], goal: Goal, most: int
) -> list[SchedulePoint]:
    """The points that exchanges lead to in ``most`` simulations, the fastest first, or ``start`` alone."""
    if start.chain is None or goal.deadline.passed:
        return [start]
    starts = [start, *beyond]
    schedules = [each.schedule for each in starts]
    simulations = _affordable(start, goal, most)
    exchange = Exchange(judge_of(judge, start), goal.limit, simulations, goal.deadline)
    found = exchange(schedules[0], schedules[1:])
    if goal.bound is not None:
        simulated = simulations - exchange.simulations
        goal.bound.spend(simulated * len(schedules[0].steps) / EXECUTIONS_A_SECOND)
    every = {schedule: origin for schedule, origin in (found, *exchange.coarse) if schedule != start.schedule}
    return [improved(judge, start, starts[origin], schedule) for schedule, origin in every.items()] or [start]


def _affordable(start: SchedulePoint, goal: Goal, most: int) -> int:
    """How many schedules may be simulated: of what is left for searches, half at once."""
    if goal.bound is None:
        return most
    left = goal.bound.left(start.time) / 2
    return min(most, int(left * EXECUTIONS_A_SECOND / max(1, len(start.schedule.steps))))


def improved(
    judge: Judge, start: SchedulePoint, origin: SchedulePoint, schedule: Schedule
) -> SchedulePoint:
    """The point of a schedule that a search led to from ``origin``, in place of ``start``."""
    if not origin.decisions:  # the plain step, or repaired from it
        origin = start
    composed_time = start.time if start.composed_time is None else start.composed_time
    point = judge_of(judge, start)(schedule, origin.decisions)
    return replace(point, parted=start.parted, composed_time=composed_time, chain=origin.chain)

"""Polishing as a search: for the limit of a plan, where a bound says that a good deal could be gained."""

from __future__ import annotations

from typing import Final

from hybridremat.sequence.bounds.certificate import QUICK, bound_under, time_once
from hybridremat.sequence.exchange.improve import improved
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.parts import judge_of
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.search import Goal, Level

PROMISING: Final = 0.01
"""The share of its time that a plan has to be from the bound, for it to be polished."""

A_DETERMINISTIC_SECOND: Final = 3.5
"""Seconds of a nominal core that polishing takes for each deterministic one of CP-SAT."""

LEAST: Final = 0.05
"""Deterministic seconds below which nothing is polished."""


def polishing(judge: Judge, pool: Pool, goal: Goal) -> Pool:
    """What CP-SAT finds under the limit (:class:`~hybridremat.sequence.search.Search`)."""
    start = pool.under(goal.limit)
    if start is None or start.chain is None or goal.level < Level.FULL or goal.deadline.passed:
        return pool
    effort = _effort(judge, start, goal)
    if effort <= 0:
        return pool
    from hybridremat.sequence.polish import search

    polish = search.Polish(
        judge_of(judge, start),
        goal.limit,
        effort=effort,
        deadline=goal.deadline,
        report=lambda spent: goal.progress("polishing", round(100 * spent), 100),
    )
    schedule = polish(start.schedule)
    if goal.bound is not None:
        spent = polish.spent * A_DETERMINISTIC_SECOND
        goal.bound.spend(search.preparation_seconds(start.schedule) + spent)
    if schedule == start.schedule:
        return pool
    return pool.with_points([improved(judge, start, start, schedule)])


def _effort(judge: Judge, start: SchedulePoint, goal: Goal) -> float:
    """CP-SAT's deterministic seconds for a schedule; 0 if none takes a good deal less time."""
    worth = int(start.time * (1 - PROMISING))
    if worth < time_once(judge.graph) or _left(start, goal) <= 0:
        return 0.0
    bound = bound_under(judge, goal.limit, start.schedule, QUICK)
    return _left(start, goal, bound) if bound <= worth else 0.0


def _left(start: SchedulePoint, goal: Goal, bound: int | None = None) -> float:
    """Deterministic seconds that are left for a schedule; too few to begin are none."""
    from hybridremat.sequence.polish import search  # programs of its own

    if goal.bound is None:
        return search.EFFORT
    left = goal.bound.left(start.time, bound) - search.preparation_seconds(start.schedule)
    searching = left / A_DETERMINISTIC_SECOND
    return min(search.EFFORT, searching) if searching >= LEAST else 0.0

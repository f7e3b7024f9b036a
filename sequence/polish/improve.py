"""Polishing as a search: for the limit of a plan, where a bound says that a good deal could be gained."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hybridremat.graph.joint import Schedule
from hybridremat.sequence.bounds.certificate import QUICK, bound_under, time_once
from hybridremat.sequence.exchange.improve import improved
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.parts import judge_of
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.search import Goal, Level

if TYPE_CHECKING:
    from hybridremat.sequence.polish.search import Look

CLOSE: Final = 0.0002
"""The share of its time within which a bound says that a plan is as good as any."""

PROMISING: Final = 0.01
"""The share of its time that a plan has to be from the bound, for deep windows to be searched first."""

A_DETERMINISTIC_SECOND: Final = 3.5
"""Seconds of a nominal core that polishing takes for each deterministic one of CP-SAT."""

LEAST: Final = 0.05
"""Deterministic seconds below which nothing is polished."""


def polishing(judge: Judge, pool: Pool, goal: Goal) -> Pool:
    """What CP-SAT finds under the limit (:class:`~hybridremat.sequence.search.Search`)."""
    start = pool.under(goal.limit)
    if start is None or start.chain is None or goal.level < Level.FULL or goal.deadline.passed:
        return pool
    nearly = int(start.time * (1 - CLOSE))
    if nearly < time_once(judge.graph) or _left(start, goal) <= 0:
        return pool
    bound = bound_under(judge, goal.limit, start.schedule, QUICK)
    if bound > nearly:
        return pool
    from hybridremat.sequence.polish.search import LOOKS  # programs of its own

    schedule = start.schedule
    far = bound <= start.time * (1 - PROMISING)
    for look in LOOKS if far else LOOKS[1:]:
        schedule = _polished(judge_of(judge, start), schedule, goal, look, _left(start, goal, bound))
    if schedule == start.schedule:
        return pool
    return pool.with_points([improved(judge, start, start, schedule)])


def _polished(judge: Judge, schedule: Schedule, goal: Goal, look: Look, left: float) -> Schedule:
    """What a look finds in at most so many deterministic seconds, which it spends."""
    from hybridremat.sequence.polish import search

    if left <= 0 or goal.deadline.passed:
        return schedule
    polish = search.Polish(
        judge,
        goal.limit,
        replace(look, effort=min(left, look.effort)),
        deadline=goal.deadline,
        report=lambda spent: goal.progress("polishing", round(100 * spent), 100),
    )
    found = polish(schedule)
    if goal.bound is not None:
        spent = polish.spent * A_DETERMINISTIC_SECOND
        goal.bound.spend(search.preparation_seconds(schedule) + spent)
    return found


def _left(start: SchedulePoint, goal: Goal, bound: int | None = None) -> float:
    """Deterministic seconds that are left for a schedule; too few to begin are none."""
    from hybridremat.sequence.polish import search

    most = max((look.effort for look in search.LOOKS), default=0.0)
    if goal.bound is None:
        return most
    left = goal.bound.left(start.time, bound) - search.preparation_seconds(start.schedule)
    searching = left / A_DETERMINISTIC_SECOND
    return min(most, searching) if searching >= LEAST else 0.0

"""What a strategy over the whole graph is: it knows no blocks, and looks for a schedule for each limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from hybridremat.graph.joint import JointGraph, Schedule, plain_schedule
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import Pool, SchedulePoint, pareto_frontier
from hybridremat.sequence.repair import PinRepair
from hybridremat.sequence.search import Goal, Level

ATTEMPTS: Final = 4
"""Searches for one limit, each under what the one before was beyond it."""


@dataclass(frozen=True)
class Found:
    """Schedules that a search came to.

    Attributes
    ----------
    schedules
        Some of them may need more than was asked for: what they need is simulated.
    least_time
        Nanoseconds that no schedule of the strategy beats under the limit; None if that is not known.
    """

    schedules: Sequence[Schedule]
    least_time: int | None = None


class Search(Protocol):
    """A strategy's search in one graph."""

    def under(self, limit: int) -> Found:
        """Fast schedules under a limit in bytes, as the strategy counts them."""

    def least(self, known: int) -> Found:
        """Schedules of little memory; ``known``: bytes that one is known to need."""


@dataclass(frozen=True)
class WholeGraph:
    """A strategy over the whole joint graph.

    Attributes
    ----------
    name
        As the user writes it.
    search
        Begins a search in a graph; a GraphSizeError if it is too large.
    """

    name: str
    search: Callable[[JointGraph], Search]


class WholeGraphSearch:
    """What a strategy finds in one graph, in exact figures; a search for the limit of a plan.

    Its points have the chain 0, whose blocks show what a schedule does.

    Raises
    ------
    GraphSizeError
        If the graph is too large for it.
    """

    def __init__(self, strategy: WholeGraph, judge: Judge) -> None:
        self._search, self._judge = strategy.search(judge.graph), judge
        self._repair = PinRepair(judge.graph, judge.pins)
        plain = judge(self._repair(plain_schedule(judge.graph)))
        self._plain_peak, self._most = plain.peak, plain.needs
        self._pool = self._points(Found([plain.schedule]))  # all that was found for any limit

    def least(self) -> tuple[SchedulePoint, ...]:
        """The plain step, and what is found that needs less, down to the least."""
        self._pool += self._points(self._search.least(self._plain_peak))
        return pareto_frontier(self._pool)

    def under(self, limit: int) -> tuple[SchedulePoint, ...]:
        """What is found for a limit in bytes, or was for others; their least time is that under this limit.

        The limit that is searched for is lowered where schedules need more than the search counts.
        """
        budget = min(limit, self._most)
        proven: int | None = None
        for attempt in range(ATTEMPTS):
            searched = self._search.under(budget)
            proven = searched.least_time if attempt == 0 else proven  # later ones are under less
            last = self._points(searched)
            self._pool += last
            over = min((each.needs for each in last), default=limit) - limit
            if over <= 0:
                break
            budget -= over
        return tuple(replace(each, least_time=proven) for each in pareto_frontier(self._pool))

    def __call__(self, _judge: Judge, pool: Pool, goal: Goal) -> Pool:
        """See :class:`~hybridremat.sequence.search.Search`; what is proved holds for all of the pool."""
        if goal.level < Level.FULL:
            return pool
        found = self.under(goal.limit)
        proven = found[0].least_time if found else None
        both = pool.with_points([each for each in found if each.needs <= goal.limit])
        return replace(both, points=tuple(replace(each, least_time=proven) for each in both.points))

    def _points(self, found: Found) -> list[SchedulePoint]:
        repaired = dict.fromkeys(map(self._repair, found.schedules))
        points = (replace(self._judge(each), chain=0) for each in repaired)
        return [each for each in points if self._judge.allows(each.schedule)]

"""What a search is: it takes a pool of one graph's schedules, and returns it with what it has found.

A strategy is a tuple of searches. One after the other begins at what those before it found, under the same
limit; each returns schedules that the judge allows and that need no more than this limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.sequence.effort import SearchBound
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import Pool, SchedulePoint

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


def no_progress(_stage: str, _done: int, _total: int) -> None:
    """Show nothing."""


class Level(IntEnum):
    """How hard is searched. A search that is not worth it at a level returns the pool as it is."""

    QUICK = 0
    """For one of many limits, as along a frontier."""
    THOROUGH = 1
    """For one limit among a few: the least memory, or what bisection looks at."""
    FULL = 2
    """For the limit of a plan."""
    REST = 3
    """For the limit of a plan, from what a thorough search has found."""


@dataclass(frozen=True)
class Goal:
    """What schedules are looked for.

    Attributes
    ----------
    limit
        Bytes that they may need.
    plain_peak
        Bytes of the plain step.
    level
        How hard is searched.
    beyond
        Faster schedules that need more, to begin at as well; None: what is found under higher limits.
    deadline
        When to end with the best so far.
    bound
        What all searches of a graph may spend together; None: caps of their own alone.
    progress
        Called by searches that take long.
    """

    limit: int
    plain_peak: int
    level: Level = Level.FULL
    beyond: tuple[SchedulePoint, ...] | None = None
    deadline: Deadline = NO_DEADLINE
    bound: SearchBound | None = field(default=None, compare=False)
    progress: Progress = field(default=no_progress, compare=False)


class Search(Protocol):
    """Looks for schedules of one graph."""

    def __call__(self, judge: Judge, pool: Pool, goal: Goal, /) -> Pool:
        """The pool with more schedules that the judge allows, and that need no more than the goal's limit.

        The pool's base stays as it is.
        """
        ...


def search_all(searches: Iterable[Search], judge: Judge, pool: Pool, goal: Goal) -> Pool:
    """What searches find, one after the other."""
    for search in searches:
        pool = search(judge, pool, goal)
    return pool

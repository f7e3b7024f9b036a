"""How much is searched for one plan: counted work, in seconds of a nominal core, so that plans repeat.

A search is worth what its result can win back. What one step can save is won in each of the many steps of a
training run, and planning that takes no longer than the capture before it is hardly noticed: searches may
take the larger of both. Without such a bound every search goes to caps of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Final

from hybridremat.graph.joint import JointGraph

STEPS: Final = 1000
"""Steps in which a plan has to win back what its search takes."""

MOST: Final = 60.0
"""Seconds that a search takes at most for what it could win."""

SHORT: Final = 0.125
CAPTURES: Final = 2
"""For steps of less than so many seconds (as powers of two), a search takes so many captures at most: nobody
waits a minute for a step of some milliseconds, whatever it could win."""

CAPTURE: Final = 1.0
CAPTURE_OF_OP: Final = 0.0015
"""Seconds of any capture, and for one op of a joint graph, about: counted, since a measured time would be
another in every run, and with it the plan."""

FOR_BLOCKS: Final = 0.5
"""The share of what is allowed that block tables take at most."""

TYPICAL_GAP: Final = 0.05
"""What a finer search wins of a step's time, as a rule: it is looked for at once where that pays."""


WHOLE: Final = 12.0
"""Seconds of a second search, where the first has found nothing that fits: whatever it could win."""


def power_of_two(seconds: float) -> float:
    """The nearest power of two: nearly equal times give equal searches."""
    return 2.0 ** round(log2(seconds)) if seconds > 0 else 0.0


@dataclass(frozen=True)
class PlanningEffort:
    """What bounds the search for a plan of one graph, in seconds, as powers of two.

    Attributes
    ----------
    capture
        About what the capture took.
    step
        What a plain step takes, by the cost model.
    """

    capture: float
    step: float

    @classmethod
    def of(cls, graph: JointGraph, plain_time: int) -> PlanningEffort:
        """That of a graph whose plain step takes so many nanoseconds."""
        return cls.of_ops(len(graph.ops), plain_time)

    @classmethod
    def of_ops(cls, ops: int, plain_time: int) -> PlanningEffort:
        """That of a step of so many ops, which takes so many nanoseconds as it is."""
        return cls(power_of_two(CAPTURE + CAPTURE_OF_OP * ops), power_of_two(plain_time / 1e9))

    def seconds(self, gap: float) -> float:
        """What a search may take that can save at most this share of the step."""
        most = min(MOST, CAPTURES * self.capture) if self.step < SHORT else MOST
        return max(self.capture, min(most, STEPS * self.step * max(0.0, gap)))


class SearchBound:
    """What exchanges and polishing may still spend on one frontier.

    Parameters
    ----------
    effort
        What bounds them.
    plain_time, time_once
        Nanoseconds of the plain step, and of what runs in any schedule.
    """

    def __init__(self, effort: PlanningEffort, plain_time: int, time_once: int) -> None:
        self._effort, self._plain, self._once = effort, max(1, plain_time), time_once
        self._spent = 0.0

    def left(self, time: int, bound: int | None = None) -> float:
        """Seconds for a search from a schedule of so many nanoseconds.

        ``bound``: that no schedule beats, if more is known than what runs in any schedule.
        """
        gap = (time - (self._once if bound is None else bound)) / self._plain
        return max(0.0, self._effort.seconds(gap) - self._spent)

    def spend(self, seconds: float) -> None:
        """Count work that was done."""
        self._spent += seconds


class Budget(SearchBound):
    """So many seconds, whatever could be won."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._spent = seconds, 0.0

    def left(self, time: int, bound: int | None = None) -> float:
        """See :class:`SearchBound`."""
        del time, bound
        return max(0.0, self._seconds - self._spent)

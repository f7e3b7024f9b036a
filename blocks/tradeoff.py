"""Trade-offs of least time against saved bytes within one peak limit, and what a tighter limit loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

INFEASIBLE: Final = 2**29
"""Time units of what is impossible."""


@dataclass(frozen=True)
class FamilyTradeoff:
    """Least time against saved bytes, in units, times falling; ``peaks`` are those of the options found."""

    saved: Integers
    times: Integers
    peaks: Integers

    def losses(self, tighter: FamilyTradeoff, much: int) -> Integers:
        """Time units lost by each option where only the tighter limit's are left; ``much`` where none is."""
        places = np.searchsorted(tighter.saved, self.saved, side="right") - 1
        losses = np.full(len(places), much)
        there = places >= 0
        losses[there] = tighter.times[places[there]] - self.times[there]
        return losses


@dataclass(frozen=True)
class Tradeoff:
    """What fits within one peak limit (units).

    ``families`` has one trade-off of ordinary options for each family (by the skip values they leave unread).
    ``solo`` is the least time of a solo option, ``solo_peak`` its peak.
    """

    limit: int
    families: tuple[FamilyTradeoff, ...]
    solo: int
    solo_peak: int

    @staticmethod
    def infeasible(limit: int, families: int) -> Tradeoff:
        """The trade-off at a limit that nothing fits."""
        none = np.empty(0, np.int64)
        return Tradeoff(limit, (FamilyTradeoff(none, none, none),) * families, INFEASIBLE, 0)

    def lost(self, tighter: Tradeoff, much: int, tolerance: int) -> tuple[int, int]:
        """Most time units lost from this limit to a tighter one, and the highest peak of what is lost.

        ``much`` counts where nothing fits the tighter limit; up to ``tolerance`` nothing is lost.
        """
        losses = [own.losses(other, much) for own, other in zip(self.families, tighter.families, strict=True)]
        solo = much if self.solo < INFEASIBLE <= tighter.solo else tighter.solo - self.solo
        gaps = np.concatenate((*losses, [solo]))
        peaks = np.concatenate((*(family.peaks for family in self.families), [self.solo_peak]))
        return int(gaps.max()), int(peaks[gaps > tolerance].max(initial=0))

    @property
    def empty(self) -> bool:
        """Whether nothing fits."""
        return not any(len(family.saved) for family in self.families) and self.solo >= INFEASIBLE

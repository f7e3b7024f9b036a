"""Which peak limits to look at: the range is divided where the trade-offs of two limits differ most.

Two limits with the same trade-off of time against saved bytes have nothing between them, so an interval is
done when its trade-offs differ by no more than the tolerance. Where nothing fits below some limit, the least
feasible peak is searched for first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hybridremat.blocks.surface import Surface
from hybridremat.blocks.tradeoff import Tradeoff
from hybridremat.blocks.types import Option

FINE: Final = 0.01
"""Share of all limits below which the exact peak where something is lost is looked for."""

LEAST_PEAK: Final = 400
"""The least peak is found to this part of itself."""


def explore_peak_limits(surface: Surface, *, limits: int, resolution: float, much: int) -> None:
    """Find the options worth having with at most about ``limits`` peak limits.

    ``resolution`` is the smallest difference of two limits as a share of their range, ``much`` the time units
    at stake where nothing fits the tighter of two limits.
    """
    scale = surface.lattice.scale
    (free,) = surface.tradeoffs([scale.most_units])
    if free.empty:
        return
    top = -(-max(max(o.forward_peak, o.backward_peak) for o in _ends(surface)) // scale.unit)
    low = max((max(step.during, step.tail) for step in scale.steps), default=0) - 1
    (loosest,) = surface.tradeoffs([top])
    nothing = Tradeoff.infeasible(low, len(surface.families))
    intervals = [_Interval.between(nothing, loosest, surface, much)]
    while intervals and surface.sweeps < limits:
        found = [(interval.stake(surface, resolution, top - low), interval) for interval in intervals]
        worth = sorted(
            (pair for pair in found if pair[0] > 0), key=lambda pair: (-pair[0], pair[1].tight.limit)
        )
        room = min(surface.batch, limits - surface.sweeps)
        chosen = [interval for _, interval in worth[:room]]
        share = room if len(chosen) == 1 else 1
        places = [interval.places(share, (top - low) * FINE) for interval in chosen]
        tradeoffs = iter(surface.tradeoffs([limit for inner in places for limit in inner]))
        intervals = [interval for _, interval in worth[room:]]
        for interval, inner in zip(chosen, places, strict=True):
            row = [interval.tight, *(next(tradeoffs) for _ in inner), interval.loose]
            intervals += [_Interval.between(a, b, surface, much) for a, b in pairwise(row)]


@dataclass(frozen=True)
class _Interval:
    """Two neighbouring limits; ``gap`` time units are lost at most, by options with peaks up to ``reach``."""

    tight: Tradeoff
    loose: Tradeoff
    gap: int
    reach: int

    @staticmethod
    def between(tight: Tradeoff, loose: Tradeoff, surface: Surface, much: int) -> _Interval:
        """The interval of two neighbouring limits, with what is lost by solving none between them."""
        return _Interval(tight, loose, *loose.lost(tight, much, surface.tolerance))

    def stake(self, surface: Surface, resolution: float, whole: int) -> float:
        """Time that may be lost between the limits, by their distance; 0 if not worth looking."""
        width = self.reach - self.tight.limit
        if width <= 1 or self.gap <= surface.tolerance:
            return 0.0
        if self.tight.empty and not self.loose.empty and width > max(1, self.loose.limit // LEAST_PEAK):
            return float("inf")
        return self.gap * (width / whole + 0.01) if width > resolution * whole else 0.0

    def places(self, share: int, fine: float) -> list[int]:
        """Up to ``share`` limits that divide the interval; in a narrow one, just below the highest peak."""
        low, high = self.tight.limit, self.reach
        if high - low <= fine and not self.tight.empty:
            return [high - 1]
        inner = {low + (high - low) * part // (share + 1) for part in range(1, share + 1)}
        return sorted(inner - {low, high})


def _ends(surface: Surface) -> list[Option]:
    """The fastest and the leanest of each family, and the fastest solo option."""
    problem, ends = surface.lattice.problem, surface.solo[:1]
    for family in surface.families:
        options = [
            option
            for option in surface.options
            if option.idle >= family.unread and (family.rerun_only or not problem.rerun_only(option))
        ]
        if options:
            ends.append(min(options, key=lambda o: (o.time, o.saved_bytes)))
            ends.append(min(options, key=lambda o: (o.saved_bytes, o.time)))
    return ends

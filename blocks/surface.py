"""The Pareto set of one block from sweeps of its lattice: every saved size at once, one peak limit at a time.

Two limits with the same curve of time against saved bytes have nothing between them. So the range of peaks
is halved where the curves of two limits differ most, until none differs by more than the tolerance. Where
nothing fits below some limit, the least feasible peak is closed in on first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.blocks.forward_side import forward_side
from hybridremat.blocks.lattice import NEVER, Lattice, Sweep
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import Option

MOST_ENTRIES: Final = 2**19
"""Sets times limits of one sweep: keeps its arrays within the processor's caches."""

FINE: Final = 0.01
"""Share of all limits below which the exact peak where something is lost is looked for."""

LEAST_PEAK: Final = 400
"""The least peak is found to this part of itself."""


@dataclass(frozen=True)
class Curve:
    """Least time against saved bytes within one peak limit: both in units, times falling.

    ``peaks`` are those of the options found, ``solo`` is the least time of a solo option, ``solo_peak`` its
    peak.
    """

    limit: int
    saved: NDArray[np.int64]
    times: NDArray[np.int64]
    peaks: NDArray[np.int64]
    solo: int
    solo_peak: int

    def lost(self, tighter: Curve, much: int, tolerance: int) -> tuple[int, int]:
        """Most time units lost from this limit to a tighter one, and the highest peak of what is lost.

        ``much`` counts where nothing fits the tighter limit; up to ``tolerance`` nothing is lost.
        """
        places = np.searchsorted(tighter.saved, self.saved, side="right") - 1
        losses = np.full(len(places), much)
        there = places >= 0
        losses[there] = tighter.times[places[there]] - self.times[there]
        solo = much if self.solo < NEVER <= tighter.solo else tighter.solo - self.solo
        gaps = np.append(losses, solo)
        matter = gaps > tolerance
        return int(gaps.max()), int(np.append(self.peaks, self.solo_peak)[matter].max(initial=0))

    @property
    def empty(self) -> bool:
        """Whether nothing fits."""
        return not len(self.saved) and self.solo >= NEVER


@dataclass
class Surface:
    """Options of one block, found curve by curve.

    Attributes
    ----------
    tolerance
        Time units not worth an option.
    options, solo
        What was found, simulated.
    sweeps
        Peak limits looked at.
    """

    lattice: Lattice
    tolerance: int = 0
    options: list[Option] = field(default_factory=list)
    solo: list[Option] = field(default_factory=list)
    sweeps: int = 0

    def __post_init__(self) -> None:
        self.forward = forward_side(self.lattice)
        self._order = np.argsort(self.forward.saved, kind="stable")
        self.batch = max(1, min(16, MOST_ENTRIES >> len(self.lattice.values)))

    def curves(self, limits: Sequence[int]) -> list[Curve]:
        """Curves at ``limits`` (units); their options are added to those known."""
        found = []
        for first in range(0, len(limits), self.batch):
            some = limits[first : first + self.batch]
            sweep = self.lattice.sweep(np.array(some, np.int64))
            table = sweep.times.reshape(-1, len(some))
            found += [self._curve(sweep, table[:, k], k, limit) for k, limit in enumerate(some)]
        self.sweeps += len(limits)
        return found

    def _curve(self, sweep: Sweep, backward: NDArray[np.int32], k: int, limit: int) -> Curve:
        order, forward = self._order, self.forward
        times = backward + forward.time
        times[(forward.peak > limit) | (times >= NEVER)] = NEVER
        along = times[order]
        best = np.minimum.accumulate(along)
        falls = np.flatnonzero(best < np.concatenate(([NEVER], best[:-1])))
        kept = order[self._worth(falls, best)]
        solo = int(backward[0])
        peaks = [self._add(sweep, int(chosen), k, limit, int(times[chosen])) for chosen in kept]
        solo_peak = self._add(sweep, None, k, limit, solo) if solo < NEVER else 0
        return Curve(limit, forward.saved[kept], times[kept], np.array(peaks, np.int64), solo, solo_peak)

    def _worth(self, falls: NDArray[np.int64], best: NDArray[np.int64]) -> NDArray[np.int64]:
        """The leanest, those that gain more than the tolerance on the one before, and the fastest."""
        kept: list[int] = []
        for place in falls:
            if not kept or best[kept[-1]] - best[place] > self.tolerance:
                kept.append(int(place))
        if len(falls) and best[falls[-1]] < best[kept[-1]]:
            kept.append(int(falls[-1]))
        return np.array(kept, np.int64)

    def _add(self, sweep: Sweep, chosen: int | None, k: int, limit: int, time: int) -> int:
        """Add the option of one set (None: solo), unless a known one is as good; its peak in units."""
        known = self.solo if chosen is None else self.options
        scale, problem = self.lattice.scale, self.lattice.problem
        saved = 0 if chosen is None else int(self.forward.saved[chosen]) * scale.unit
        for option in known:
            peak = max(option.forward_peak, option.backward_peak)
            if (
                option.saved_bytes <= saved
                and peak <= limit * scale.unit
                and option.time <= time * scale.tick
            ):
                return -(-peak // scale.unit)
        again = self.lattice.decode(sweep, chosen or 0, k)
        if chosen is None:
            known.append(simulate_option(problem, (), (), again, solo=True))
            return _peak_units(known[-1], scale.unit)
        last = len(self.lattice.values) - 1
        values = [d for axis, ds in enumerate(self.lattice.values) if chosen >> (last - axis) & 1 for d in ds]
        early = [c for c, runs in self.forward.runs.items() if runs[chosen]]
        known.append(simulate_option(problem, values, early, again))
        return _peak_units(known[-1], scale.unit)


def explore(surface: Surface, *, limits: int, resolution: float, much: int) -> None:
    """Find the options worth having with at most about ``limits`` peak limits.

    ``resolution`` is the smallest difference of two limits as a share of their range, ``much`` the time units
    at stake where nothing fits the tighter of two limits.
    """
    scale = surface.lattice.scale
    (free,) = surface.curves([scale.most_units])
    if free.empty:
        return
    ends = [max(o.forward_peak, o.backward_peak) for o in (*_ends(surface.options), *_ends(surface.solo))]
    top = -(-max(ends) // scale.unit)
    low = max((max(step.during, step.tail) for step in scale.steps), default=0) - 1
    none = np.empty(0, np.int64)
    nothing = Curve(low, none, none, none, NEVER, 0)
    (loosest,) = surface.curves([top])
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
        curves = iter(surface.curves([limit for inner in places for limit in inner]))
        intervals = [interval for _, interval in worth[room:]]
        for interval, inner in zip(chosen, places, strict=True):
            row = [interval.tight, *(next(curves) for _ in inner), interval.loose]
            intervals += [_Interval.between(a, b, surface, much) for a, b in pairwise(row)]


@dataclass(frozen=True)
class _Interval:
    """Two neighbouring limits; ``gap`` time units are lost at most, by options with peaks up to ``reach``."""

    tight: Curve
    loose: Curve
    gap: int
    reach: int

    @staticmethod
    def between(tight: Curve, loose: Curve, surface: Surface, much: int) -> _Interval:
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


def _ends(options: Sequence[Option]) -> tuple[Option, ...]:
    """The fastest and the leanest."""
    if not options:
        return ()
    fastest = min(options, key=lambda o: (o.time, o.saved_bytes))
    return fastest, min(options, key=lambda o: (o.saved_bytes, o.time))


def _peak_units(option: Option, unit: int) -> int:
    return -(-max(option.forward_peak, option.backward_peak) // unit)

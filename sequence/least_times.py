"""The rows of the table, and the least of many ways to fill one: pointwise minima of shifted rows.

A row holds a time for each slot of memory, and more memory never takes more time. So between two slots no way
takes less than at the second, and the best takes no more than at the first. Ways are looked at on a few
slots, and then, slot by slot, only between those where they may be the best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Row = NDArray[np.float32]
"""Times in ticks by slot (whole numbers, exact below 2**24); infinite where nothing fits."""

SPANS: Final = 24
"""About as many spans of slots are told apart at first, and some shorter ones where a row begins."""


@dataclass(frozen=True, slots=True)
class OptionWays:
    """Ways to fill a row of (s,t) that run block s with an option: one entry for each.

    With ``least`` slots or more: the time of ``rest``, the row of the blocks after s, with ``saved`` slots
    less (below zero: more), and ``time`` ticks.
    """

    rest: Integers
    saved: Integers
    least: Integers
    time: Row


@dataclass(frozen=True, slots=True)
class CheckpointWays:
    """Ways that checkpoint at a boundary j: one entry for each.

    With ``least`` slots or more: the time of ``later``, the row of (j,t), with ``carried`` slots less, and
    that of ``earlier``, the row of (s,j−1), with ``grown`` less (below zero: more) and a plain forward first.
    """

    later: Integers
    carried: Integers
    earlier: Integers
    grown: Integers
    least: Integers


class TimeRows:
    """All rows of a table, each with ``slots`` entries.

    Attributes
    ----------
    times
        Times in ticks: rows × slots.
    after_forward
        The same, with one plain forward of the blocks before.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self.slots = slots
        self.times = np.full((rows, slots), np.inf, np.float32)
        self.after_forward = np.full((rows, slots), np.inf, np.float32)
        self._feasible = np.full(rows, slots, np.int64)  # the first slot of each row where something fits
        step = 1 << max(2, (slots // SPANS).bit_length() - 1)
        starts = {0, *(1 << n for n in range(step.bit_length())), *range(step, slots, step)}
        self._starts = np.array(sorted(starts), np.int64)
        self._spare = np.empty(slots, np.float32)

    def fill(self, row: int, times: Row, forward: float) -> None:
        """Write a row; ``forward`` are the ticks of one plain forward of its blocks."""
        self.times[row] = times
        self._complete(row, forward)

    def fill_least(self, row: int, options: OptionWays, splits: CheckpointWays, forward: float) -> None:
        """Write the least time of all ways into a row; the rows that they name are filled."""
        ways = self._feasible_ways(options, splits)
        if len(ways.first):
            self._put_least(self.times[row], ways)
        self._complete(row, forward)

    def _complete(self, row: int, forward: float) -> None:
        times = self.times[row]
        np.add(times, np.float32(forward), out=self.after_forward[row])
        # times never grow, and infinite ones come first
        self._feasible[row] = self.slots - np.searchsorted(times[::-1], np.inf)

    def _put_least(self, best: Row, ways: _Ways) -> None:
        """Put the least time of all ways into an infinite row."""
        places = self._starts + ways.first.min()
        places = np.append(places[places < self.slots - 1], self.slots - 1)
        looks = self._at(ways, places)
        least = looks.min(axis=0)
        best[places[0] :] = least.repeat(np.append(places[1:], self.slots) - places)
        # places[i] stands for the slots from there to places[i+1], where no time is below that of the end
        promising = looks[:, 1:] < least[:-1]
        chosen = np.flatnonzero(promising.any(axis=1))
        if not len(chosen):
            return
        begins = np.maximum(places[promising[chosen].argmax(axis=1)], ways.first[chosen])
        ends = places[len(places) - 1 - promising[chosen, ::-1].argmax(axis=1)]
        self._take(best, ways.of(chosen), begins, ends)

    def _feasible_ways(self, options: OptionWays, splits: CheckpointWays) -> _Ways:
        begin = np.maximum(options.least, self._feasible[options.rest] + options.saved)
        some = np.flatnonzero(begin < self.slots)
        first, later = begin[some], options.rest[some] * self.slots - options.saved[some]
        begin = np.maximum(self._feasible[splits.later] + splits.carried, splits.least)
        begin = np.maximum(begin, self._feasible[splits.earlier] + splits.grown)
        these = np.flatnonzero(begin < self.slots)
        last = self.slots - 1
        return _Ways(
            np.concatenate((first, begin[these])),
            np.concatenate((later, splits.later[these] * self.slots - splits.carried[these])),
            np.concatenate((options.rest[some], splits.later[these])) * self.slots + last,
            options.time[some],
            splits.earlier[these] * self.slots - splits.grown[these],
            splits.earlier[these] * self.slots + last,
        )

    def _at(self, ways: _Ways, places: Integers) -> NDArray[np.float32]:
        """The times of all ways at some slots: ways × places."""
        count = len(ways.time)
        within = np.maximum(places, ways.first[:, None])
        looks = self.times.reshape(-1)[np.minimum(within + ways.later[:, None], ways.later_end[:, None])]
        looks[:count] += ways.time[:, None]
        earlier = np.minimum(within[count:] + ways.earlier[:, None], ways.earlier_end[:, None])
        looks[count:] += self.after_forward.reshape(-1)[earlier]
        looks[places < ways.first[:, None]] = np.inf
        return looks

    def _take(self, best: Row, ways: _Ways, begins: Integers, ends: Integers) -> None:
        """Put into ``best`` what each way takes from one slot to another, where that is less."""
        times, forwards, spare = self.times.reshape(-1), self.after_forward.reshape(-1), self._spare
        at = (ways.later + begins).tolist()
        spans = list(zip(at, (ways.later_end + 1).tolist(), begins.tolist(), ends.tolist(), strict=True))
        count = len(ways.time)
        for (a, a_end, begin, end), time in zip(spans, ways.time.tolist(), strict=False):
            size, old = end - begin, best[begin:end]
            part = times[a : a + size] if a + size <= a_end else _held(times, a, a_end, size)
            np.minimum(old, np.add(part, time, out=spare[:size]), out=old)
        others = zip((ways.earlier + begins[count:]).tolist(), (ways.earlier_end + 1).tolist(), strict=True)
        for (a, a_end, begin, end), (b, b_end) in zip(spans[count:], others, strict=True):
            size, old = end - begin, best[begin:end]
            part = times[a : a + size] if a + size <= a_end else _held(times, a, a_end, size)
            other = forwards[b : b + size] if b + size <= b_end else _held(forwards, b, b_end, size)
            np.minimum(old, np.add(part, other, out=spare[:size]), out=old)


@dataclass(frozen=True, slots=True)
class _Ways:
    """The feasible ones of both kinds, options first.

    Way i fits from slot ``first[i]`` on. At slot m it reads entry ``later[i]`` + m of all rows in a line or,
    with more slots than there are, the last one of its row, ``later_end[i]``; ``earlier`` likewise.
    """

    first: Integers
    later: Integers
    later_end: Integers
    time: Row
    earlier: Integers
    earlier_end: Integers

    def of(self, chosen: Integers) -> _Ways:
        """Some of them, ascending."""
        count = len(self.time)
        options = chosen[: int(np.searchsorted(chosen, count))]
        splits = chosen[len(options) :] - count
        return _Ways(
            self.first[chosen],
            self.later[chosen],
            self.later_end[chosen],
            self.time[options],
            self.earlier[splits],
            self.earlier_end[splits],
        )


def _held(line: Row, begin: int, end: int, size: int) -> Row:
    """``size`` entries from ``begin`` on, the last one before ``end`` again and again after it."""
    return line[np.minimum(np.arange(begin, begin + size), end - 1)]

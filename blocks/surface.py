"""The options of one block from sweeps of its lattice: every saved size at once, one peak limit at a time.

Later blocks may free an output that is a skip value before this block's backward runs, if this backward
does not read it. That is no figure of the block, so such options are looked for apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.blocks.decode import Decoded, Integers, decode
from hybridremat.blocks.forward_costs import forward_costs
from hybridremat.blocks.lattice import Lattice
from hybridremat.blocks.scratch import Scratch
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.sweep import Sweep, Sweeper, Times, Word
from hybridremat.blocks.tradeoff import INFEASIBLE, FamilyTradeoff, Tradeoff
from hybridremat.blocks.types import BlockProblem, Option

MOST_ENTRIES: Final = 2**21
"""Sets times limits of one sweep: 4 MB for each of its arrays of times."""


@dataclass(frozen=True)
class OptionFamily:
    """Options whose backward leaves the skip values ``unread``: their sets of values, by rising saved bytes.

    ``rerun_only``: they may save what must not be saved, for a block that runs again in the backward.
    """

    unread: frozenset[int]
    order: NDArray[np.int64]
    rerun_only: bool = False


@dataclass(frozen=True)
class _LeastTimes:
    """Least times within one limit, in units.

    ``times``: by set of saved values, of the forward's optional ops as well; ``solo``: of the solo option;
    ``kept``: for each family the sets whose options are worth having.
    """

    limit: int
    times: Times
    solo: int
    kept: tuple[Integers, ...]


@dataclass
class Surface:
    """Options of one block, found one peak limit at a time.

    Attributes
    ----------
    scratch
        Memory to work in.
    tolerance
        Time units not worth an option.
    sweeps
        Peak limits looked at.
    """

    lattice: Lattice
    scratch: Scratch
    tolerance: int = 0
    sweeps: int = 0

    def __post_init__(self) -> None:
        self.forward = forward_costs(self.lattice)
        self._sweeper = Sweeper(self.lattice, self.scratch)
        self.families = tuple(_families(self.lattice, self.forward.saved))
        problem = self.lattice.problem
        self._ordinary, self._solo = (
            ParetoArchive(problem),
            ParetoArchive(replace(problem, skip_values=frozenset())),
        )
        self._known: dict[tuple[bool, int, bytes], Option] = {}
        self.batch = max(1, min(16, MOST_ENTRIES >> len(self.lattice.values)))

    @property
    def options(self) -> list[Option]:
        """Ordinary options found, simulated."""
        return self._ordinary.options

    @property
    def solo(self) -> list[Option]:
        """Solo options found, simulated."""
        return self._solo.options

    def tradeoffs(self, limits: Sequence[int]) -> list[Tradeoff]:
        """Trade-offs at ``limits`` (units); their options are added to those known."""
        found: list[Tradeoff] = []
        for first in range(0, len(limits), self.batch):
            some = limits[first : first + self.batch]
            sweep = self._sweeper.sweep(np.array(some, np.int64))
            table = np.ascontiguousarray(sweep.times.reshape(-1, len(some)).T)
            least = [self._least(*each, sweep.word) for each in zip(table, some, strict=True)]
            found += self._decoded(sweep, least)
        self.sweeps += len(limits)
        return found

    def _least(self, backward: Times, limit: int, word: Word) -> _LeastTimes:
        times = backward + self.forward.time.astype(word.kind)
        np.maximum(times, np.multiply(self.forward.peak > limit, word(word.infeasible)), out=times)
        kept = tuple(self._kept(family, times, word.infeasible) for family in self.families)
        solo = int(backward[0])
        return _LeastTimes(limit, times, INFEASIBLE if solo >= word.infeasible else solo, kept)

    def _kept(self, family: OptionFamily, times: Times, infeasible: int) -> Integers:
        """The sets of a family whose options are worth having."""
        best = np.minimum.accumulate(times[family.order])
        falls = np.flatnonzero(best[1:] < best[:-1]) + 1
        falls = np.concatenate(([0], falls))
        falls = falls[best[falls] < infeasible]
        return family.order[falls[self._worth(best[falls].tolist())]]

    def _decoded(self, sweep: Sweep, found: Sequence[_LeastTimes]) -> Iterator[Tradeoff]:
        """The trade-off at each limit, from the decisions behind its times."""
        sets = [
            (int(chosen), column)
            for column, least in enumerate(found)
            for chosen in (*itertools.chain(*least.kept), 0)  # the empty one for the solo option
        ]
        decoded = decode(self.lattice, sweep, *zip(*sets, strict=True))
        ways = iter(range(len(sets)))  # the sets are gone through in the same order below
        for least in found:
            families = []
            for family, kept in zip(self.families, least.kept, strict=True):
                peaks = [self._option(family, c, least, decoded, next(ways)) for c in kept.tolist()]
                times = least.times[kept].astype(np.int64)
                families.append(
                    FamilyTradeoff(self.forward.saved[kept], times, np.array(peaks, np.int64))
                )
            way = next(ways)
            solo_peak = self._solo_peak(least, decoded, way) if least.solo < INFEASIBLE else 0
            yield Tradeoff(least.limit, tuple(families), least.solo, solo_peak)

    def _worth(self, falling: Sequence[int]) -> list[int]:
        """The leanest, those that gain more than the tolerance on the one before, and the fastest."""
        kept: list[int] = []
        for place, time in enumerate(falling):
            if not kept or falling[kept[-1]] - time > self.tolerance:
                kept.append(place)
        if kept and falling[-1] < falling[kept[-1]]:
            kept.append(len(falling) - 1)
        return kept

    def _option(
        self, family: OptionFamily, chosen: int, least: _LeastTimes, decoded: Decoded, way: int
    ) -> int:
        """Add the option of one set, unless it is known or a known one is as good; its peak in units."""
        key = family.rerun_only, chosen, decoded.key(way)  # rows are the same in every sweep of a lattice
        option = self._known.get(key) or self._as_good(family, chosen, least)
        if option is None:
            last = len(self.lattice.values) - 1
            axes = (ds for axis, ds in enumerate(self.lattice.values) if chosen >> (last - axis) & 1)
            early = [c for c, runs in self.forward.runs.items() if runs[chosen]]
            problem = self.lattice.problem.for_rerun if family.rerun_only else self.lattice.problem
            again = decoded.recomputations(way, len(problem.steps))
            option = simulate_option(problem, [d for ds in axes for d in ds], early, again)
            self._ordinary.add(option)
            self._known[key] = option
        return self._peak(option)

    def _as_good(self, family: OptionFamily, chosen: int, least: _LeastTimes) -> Option | None:
        """A known option that is as good as the one of a set."""
        unit, tick = self.lattice.scale.unit, self.lattice.scale.tick
        figures = int(self.forward.saved[chosen]) * unit, least.limit * unit, int(least.times[chosen]) * tick
        return self._ordinary.as_good(*figures, family.unread, rerun_only=family.rerun_only)

    def _solo_peak(self, least: _LeastTimes, decoded: Decoded, way: int) -> int:
        """Add the solo option, unless a known one is as good; its peak in units."""
        unit, tick = self.lattice.scale.unit, self.lattice.scale.tick
        option = self._solo.as_good(0, least.limit * unit, least.solo * tick, frozenset())
        if option is None:
            again = decoded.recomputations(way, len(self.lattice.problem.steps))
            option = simulate_option(self.lattice.problem, (), (), again, solo=True)
            self._solo.add(option)
        return self._peak(option)

    def _peak(self, option: Option) -> int:
        return -(-max(option.forward_peak, option.backward_peak) // self.lattice.scale.unit)


def _families(lattice: Lattice, saved: NDArray[np.int64]) -> Iterator[OptionFamily]:
    """By which of the skip values that the backward could read it leaves unread."""
    problem, last = lattice.problem, len(lattice.values) - 1
    axes = {axis for axis, ds in enumerate(lattice.values) if problem.skip_values.intersection(ds)}
    never_read = problem.skip_values.difference(*lattice.values)
    sets = np.argsort(saved, kind="stable")
    barred = sum(1 << (last - axis) for axis, ds in enumerate(lattice.values) if problem.never_saved & {*ds})
    if barred:
        yield OptionFamily(never_read, sets, rerun_only=True)
    sets = sets[sets & barred == 0]
    # none, each alone, all: the sets between bring little
    for count in sorted({0, min(1, len(axes)), len(axes)}):
        for chosen in combinations(sorted(axes), count):
            without = sum(1 << (last - axis) for axis in chosen)
            unread = never_read.union(
                d for axis in chosen for d in lattice.values[axis] if d in problem.skip_values
            )
            yield OptionFamily(unread, sets[sets & without == 0])


class ParetoArchive:
    """Options so far, and their figures: saved bytes, higher peak, time, rerun only, skip values read."""

    def __init__(self, problem: BlockProblem) -> None:
        self.options: list[Option] = []
        self._problem, self._skip_values = problem, sorted(problem.skip_values)
        self._figures = np.empty((64, 4 + len(self._skip_values)), np.int64)

    def add(self, option: Option) -> None:
        """One more option."""
        count = len(self.options)
        if count == len(self._figures):
            self._figures = np.concatenate((self._figures, np.empty_like(self._figures)))
        peak = max(option.forward_peak, option.backward_peak)
        rerun_only = self._problem.rerun_only(option)
        self._figures[count] = (option.saved_bytes, peak, option.time, rerun_only, *self._read(option.idle))
        self.options.append(option)

    def as_good(
        self, saved: int, peak: int, time: int, unread: frozenset[int], *, rerun_only: bool = False
    ) -> Option | None:
        """The first option that needs no more, leaves as much unread, and is for reruns only if asked."""
        most = np.array((saved, peak, time, rerun_only, *self._read(unread)))
        worse = (self._figures[: len(self.options)] > most).max(axis=1)
        good = np.flatnonzero(~worse)
        return self.options[good[0]] if len(good) else None

    def _read(self, unread: frozenset[int]) -> list[bool]:
        return [d not in unread for d in self._skip_values]

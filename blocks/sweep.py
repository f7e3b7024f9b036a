"""One sweep of a lattice from the last backward step to the first, and the decisions behind its times.

All is done on whole arrays, in memory that is kept from one sweep to the next, and without numpy's masks and
broadcasts along the short axis of the limits, which take ten times as long as the arithmetic: ``over`` holds
for each set and limit how much is alive beyond the limit, so that one number is compared with all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.blocks.lattice import Lattice
from hybridremat.blocks.scratch import Scratch
from hybridremat.blocks.sweep_program import OpProgram, RowProgram, StepProgram, sweep_programs

Times = NDArray[Any]
Flags = NDArray[np.bool_]
Over = NDArray[Any]
"""Units that are alive beyond a limit, by set and limit."""

Drop = tuple[int, Flags]
"""An axis (a value) and where it pays to drop that value."""


@dataclass(frozen=True)
class Word:
    """Numbers for times: those from ``infeasible`` on stand for what is impossible.

    Ops that take up to ``room`` time units may be added to that.
    """

    kind: type[np.generic]
    infeasible: int
    room: int

    def __call__(self, number: int) -> Any:
        """A number of this kind."""
        return self.kind(number)


NARROW: Final = Word(np.uint16, 3 * 2**14, 2**14 - 1)
"""Enough for some five forwards of a block, and twice as fast as the wide ones."""

WIDE: Final = Word(np.int32, 2**29, 2**29)


@dataclass(frozen=True)
class Rerun:
    """Ops that run in a row before a step: where it pays to run them, and what goes meanwhile."""

    ops: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    runs: Flags
    drops: tuple[Drop, ...]


@dataclass(frozen=True)
class Sweep:
    """Least times, and the decisions behind them.

    Attributes
    ----------
    times
        Backward time units by set of saved values (an axis of length 2 for each) and limit (last axis).
    stages
        For each step, its reruns in order and the values that go after it.
    word
        What ``times`` consists of.
    """

    times: Times
    stages: tuple[tuple[tuple[Rerun, ...], tuple[Drop, ...]], ...]
    word: Word


class Sweeper:
    """Sweeps of one lattice, each valid until the next in the same memory."""

    def __init__(
        self, lattice: Lattice, scratch: Scratch, words: tuple[Word, ...] = (NARROW, WIDE)
    ) -> None:
        self._lattice, self._scratch, self._steps = lattice, scratch, sweep_programs(lattice)
        self._words = [word for word in words if sum(lattice.scale.time_units) <= word.room]

    def sweep(self, limits: NDArray[np.int64]) -> Sweep:
        """Least backward times within each of ``limits`` (units at the peak of the backward)."""
        over, again = self._over(limits), sum(self._lattice.scale.time_units)
        for word in self._words:
            found = _Run(self._steps, self._scratch, over, word).sweep(again)
            if found is not None:
                return found
        raise OverflowError("times of a block beyond 29 bits")

    def _over(self, limits: NDArray[np.int64]) -> Over:
        """What every set has alive beyond each limit."""
        lattice, count = self._lattice, len(limits)
        over = self._scratch.array("over", (count << len(lattice.values),), lattice.units_kind)
        over[:count] = -limits
        for twins in reversed(lattice.values):
            units = sum(lattice.scale.value_units[d] for d in twins)
            np.add(over[:count], units, out=over[count : 2 * count])
            count *= 2
        return over.reshape((2,) * len(lattice.values) + (len(limits),))


@dataclass
class _Run:
    """One sweep in times of one kind."""

    steps: tuple[StepProgram, ...]
    scratch: Scratch
    over: Over
    word: Word
    turns: dict[str, int] = field(default_factory=dict)

    def sweep(self, again: int) -> Sweep | None:
        """The sweep; None if there may be times beyond what the word can tell.

        ``again``: what the reruns before one step take at most, where each op runs once, or all that runs in
        the forward for this block's backward.
        """
        times = self._array("times", self.over.shape[-1:])
        times[...] = 0
        stages, most = [], 0
        for j, step in reversed([*enumerate(self.steps)]):
            over = self.over[step.within]
            times, gone = self._step(j, step, times, over)
            most = self._most(times, most, again)
            if most >= self.word.infeasible:
                return None
            reruns = [self._rerun(j, row, times, over) for row in step.rows]
            stages.append((tuple(reversed(reruns)), gone))
        if self._most(times, most, again) >= self.word.infeasible:
            return None
        return Sweep(times, tuple(reversed(stages)), self.word)

    def _most(self, times: Times, most: int, again: int) -> int:
        """What times of at most ``most`` come to with ``again``; they are looked at if need be."""
        if most + again >= self.word.infeasible:
            most = int(np.where(times < self.word.infeasible, times, 0).max())
        return most + again

    def _step(self, j: int, step: StepProgram, after: Times, over: Over) -> tuple[Times, tuple[Drop, ...]]:
        """From the sets that stay after step j to the sets before it."""
        self._bar(after, over[(0,) * step.fresh], step.tail)
        times = after
        if step.fresh:
            times = self._array("times", over.shape)
            times[...] = self.word.infeasible
            times[step.stays] = after
        gone = []
        for drop in step.drops:
            kept, dropped = times[drop.kept], times[drop.dropped]
            gone.append((drop.axis, self._less(dropped, kept, (j, drop.axis))))
            np.minimum(kept, dropped, out=kept)
        for missing in step.missing:
            times[missing] = self.word.infeasible
        self._bar(times, over, step.during)
        return times, tuple(gone)

    def _rerun(self, j: int, program: RowProgram, times: Times, over: Over) -> Rerun:
        """Before step j, a row may run where all that it reads is alive and nothing that it writes."""
        best, drops = times[program.after], []
        for op in program.ops:
            level = over[op.level]
            if op.takeovers:
                best = self._where_it_fits(best, level, op)
            for drop in op.drops:
                kept, dropped = best[drop.kept], best[drop.dropped]
                drops.append((drop.axis, self._less(dropped, kept, (j, op.op, drop.axis))))
                best = np.minimum(kept, dropped, out=self._array("best", kept.shape))
            best = np.add(best, self.word(op.time), out=self._array("best", best.shape))
            if not op.takeovers:
                self._bar(best, level, op.room)
        target = times[program.before]
        runs = self._less(best, target, (j, program.row))
        np.minimum(target, best, out=target)
        return Rerun(program.row, program.reads, program.writes, runs, tuple(drops))

    def _where_it_fits(self, best: Times, level: Over, op: OpProgram) -> Times:
        """Times from the sets after an op, where what is alive meanwhile fits.

        That is less where the op writes over what is gone then.
        """
        barred = self.scratch.array("barred", best.shape, np.bool_)
        np.greater(level, op.room, out=barred)
        for gone, units in op.takeovers:
            np.greater(level, op.room + units, out=barred[gone])
        return np.maximum(best, self._barrier(barred), out=self._array("best", best.shape))

    def _bar(self, times: Times, over: Over, room: int) -> None:
        """Times become infeasible where more is alive than fits."""
        barred = np.greater(over, room, out=self.scratch.array("barred", over.shape, np.bool_))
        np.maximum(times, self._barrier(barred), out=times)

    def _barrier(self, barred: Flags) -> Times:
        """What raises times to the infeasible."""
        barrier = self.scratch.array("barrier", barred.shape, self.word.kind)
        np.multiply(barred, self.word(self.word.infeasible), out=barrier)
        return barrier

    def _less(self, one: Times, other: Times, decision: tuple[object, ...]) -> Flags:
        """Where one is less than the other, remembered as a decision."""
        flags: Flags = np.less(one, other, out=self.scratch.array(decision, other.shape, np.bool_))
        return flags

    def _array(self, name: str, shape: tuple[int, ...]) -> Times:
        """An array beside the last one of this name."""
        self.turns[name] = 1 - self.turns.get(name, 0)
        return self.scratch.array((name, self.turns[name]), shape, self.word.kind)

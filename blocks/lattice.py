"""All ways to run one block at given peaks, by an exact dynamic program over sets of values that are alive.

The backward of a block is a fixed order of events: before each step, every op that the step can need runs
again or does not; a value may go as soon as it was read. The state between events is the set of values that
are alive, one bit for each that the backward can use, and the least time from there to the end is known for
all sets at once: one numpy array with an axis of length 2 for each value, and one axis for the peak limits.
So one sweep from the last step to the first answers, for every set of saved values, what CP-SAT answers for
one pair of limits. It grows as 2 to the number of values: larger blocks are left to CP-SAT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.blocks.scale import Scale
from hybridremat.blocks.types import BlockProblem

Times = NDArray[np.int32]
Flags = NDArray[np.bool_]
Reduction = tuple[int, Flags]
"""An axis (a value) and where it pays to drop that value."""

NEVER: Final = 2**29
"""Time units of what is impossible."""


@dataclass(frozen=True)
class Slot:
    """Op c before step j: where it pays to run it, and what goes right after it."""

    op: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    runs: Flags
    drops: tuple[Reduction, ...]


@dataclass(frozen=True)
class Sweep:
    """Least times, and the decisions behind them.

    Attributes
    ----------
    times
        Backward time units by set of saved values (an axis of length 2 for each) and limit (last axis).
    stages
        For each step, its slots in order and the values that go after it.
    """

    times: Times
    stages: tuple[tuple[tuple[Slot, ...], tuple[Reduction, ...]], ...]


@dataclass
class Lattice:
    """The lattice of alive sets of one block.

    Attributes
    ----------
    values
        The value behind each axis, those that are of use the longest last: stage j knows the last
        ``width[j]`` of them.
    members
        For each step, the ops that can run again before it.
    """

    problem: BlockProblem
    scale: Scale
    values: tuple[int, ...] = field(init=False)
    width: tuple[int, ...] = field(init=False)
    members: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        problem = self.problem
        self.producer = {d: c for c, op in enumerate(problem.ops) for d in op.writes}
        needed = [self._needed(j) for j in range(len(problem.steps))]
        last: dict[int, int] = {}
        for j, (step, ops) in enumerate(zip(problem.steps, needed, strict=True)):
            for d in (*step.reads, *(d for c in ops for d in problem.ops[c].reads)):
                last[d] = j
        made = {d for ops in needed for c in ops for d in problem.ops[c].writes}
        self.values = tuple(sorted(made & last.keys(), key=lambda d: (last[d], d)))
        self.width = tuple(sum(last[d] >= j for d in self.values) for j in range(len(needed)))
        self.members = tuple(tuple(c for c in sorted(ops) if problem.ops[c].recomputable) for ops in needed)

    @property
    def exact(self) -> bool:
        """Whether sets tell all: they do not remember whether an op that may run only once has run."""
        return all(op.recomputable or not op.optional for op in self.problem.ops)

    @property
    def work(self) -> int:
        """Entries that a sweep touches for each limit."""
        return sum((len(ops) + 1) << bits for ops, bits in zip(self.members, self.width, strict=True))

    def _needed(self, j: int) -> set[int]:
        """Ops whose outputs step j reads, and those that rebuilding them needs."""
        needed = {self.producer[d] for d in self.problem.steps[j].reads}
        for c in reversed(range(len(self.problem.ops))):
            if c in needed:
                needed |= {self.producer[d] for d in self.problem.ops[c].reads}
        return needed

    def axis(self, j: int, d: int) -> int | None:
        """The axis of value d in stage j's arrays, None if it is of no use any more."""
        axis = self.values.index(d) - len(self.values) + self.width[j] if d in self.values else -1
        return axis if axis >= 0 else None

    def bytes_by_set(self) -> NDArray[np.int64]:
        """Units of every set of values."""
        total = np.zeros((2,) * len(self.values), np.int64)
        for axis, d in enumerate(self.values):
            total[_at(total.ndim, {axis: 1})] += self.scale.value_units[d]
        return total

    def sweep(self, limits: NDArray[np.int64]) -> Sweep:
        """Least backward times within each of ``limits`` (units at the peak of the backward)."""
        sizes = self.bytes_by_set()
        times = np.zeros(len(limits), np.int32)
        stages = []
        for j in reversed(range(len(self.members))):
            used = sizes[(0,) * (len(self.values) - self.width[j])]
            times, gone = self._step(j, times, used, limits)
            slots = [self._slot(j, c, times, used, limits) for c in reversed(self.members[j])]
            stages.append((tuple(reversed(slots)), gone))
        return Sweep(times, tuple(reversed(stages)))

    def _step(
        self, j: int, after: Times, used: NDArray[np.int64], limits: NDArray[np.int64]
    ) -> tuple[Times, tuple[Reduction, ...]]:
        """From the sets that stay after step j to the sets before it."""
        step, bits = self.scale.steps[j], self.width[j]
        fresh = bits - (after.ndim - 1)
        stay = used[(0,) * fresh]
        after = np.where(stay[..., None] + step.tail > limits, np.int32(NEVER), after)
        times = np.full((2,) * bits + (len(limits),), NEVER, np.int32)
        reads = [axis for d in step.reads if (axis := self.axis(j, d)) is not None]
        times[tuple(int(axis in reads) for axis in range(fresh))] = after
        gone = []
        for axis in (axis for axis in reads if axis >= fresh):
            kept, dropped = times[_at(bits, {axis: 1})], times[_at(bits, {axis: 0})]
            gone.append((axis, dropped < kept))
            np.minimum(kept, dropped, out=kept)
        for axis in reads:
            times[_at(bits, {axis: 0})] = NEVER
        np.copyto(times, NEVER, where=used[..., None] + step.during > limits)
        return times, tuple(gone)

    def _slot(self, j: int, c: int, times: Times, used: NDArray[np.int64], limits: NDArray[np.int64]) -> Slot:
        """Before step j, op c may run where all that it reads is alive and nothing that it writes."""
        op, bits = self.problem.ops[c], self.width[j]
        reads = tuple(axis for d in op.reads if (axis := self.axis(j, d)) is not None)
        writes = tuple(axis for d in op.writes if (axis := self.axis(j, d)) is not None)
        idle = sum(self.scale.value_units[d] for d in op.writes if self.axis(j, d) is None)
        before = self.scale.steps[j - 1].after if j else self.scale.gradient_in_units
        best, drops = times, []
        if len(writes) == 1:
            best = best[_at(bits, {writes[0]: 1})]
        for axis in (*(writes if len(writes) > 1 else ()), *reads):
            kept, dropped = best[_at(bits, {axis: 1})], best[_at(bits, {axis: 0})]
            drops.append((axis, dropped < kept))
            best = np.minimum(kept, dropped)
        again = best + np.int32(self.scale.time_units[c])
        room = limits - self.scale.temp_units[c] - idle - before
        np.copyto(again, NEVER, where=used[_at(bits, dict.fromkeys((*reads, *writes), 1))][..., None] > room)
        target = times[_at(bits, dict.fromkeys(reads, 1) | dict.fromkeys(writes, 0))]
        runs = again < target
        np.minimum(target, again, out=target)
        return Slot(c, reads, writes, runs, tuple(drops))

    def decode(self, sweep: Sweep, saved: int, limit: int) -> tuple[tuple[int, ...], ...]:
        """For each step the ops that run before it, from the set with flat index ``saved``."""
        alive = [saved >> axis & 1 for axis in reversed(range(len(self.values)))]
        recompute = []
        for j, (slots, gone) in enumerate(sweep.stages):
            alive = alive[len(alive) - self.width[j] :]
            ran = []
            for slot in slots:
                possible = all(alive[a] for a in slot.reads) and not any(alive[a] for a in slot.writes)
                if possible and _flag(slot.runs, alive, limit):
                    ran.append(slot.op)
                    for axis in slot.writes:
                        alive[axis] = 1
                    _drop(slot.drops, alive, limit)
            _drop(gone, alive, limit)
            recompute.append(tuple(ran))
        return tuple(recompute)


def _at(bits: int, fixed: dict[int, int]) -> tuple[slice, ...]:
    """Where the given axes have the given values; the axes stay."""
    return tuple(slice(fixed[a], fixed[a] + 1) if a in fixed else slice(None) for a in range(bits))


def _flag(flags: Flags, alive: list[int], limit: int) -> bool:
    place = tuple(bit if size > 1 else 0 for bit, size in zip(alive, flags.shape, strict=False))
    return bool(flags[(*place, limit)])


def _drop(drops: tuple[Reduction, ...], alive: list[int], limit: int) -> None:
    """What was decided last comes first: its flags take the earlier ones as decided."""
    for axis, flags in reversed(drops):
        if _flag(flags, alive, limit):
            alive[axis] = 0

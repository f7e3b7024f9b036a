"""One sweep of a lattice from the last backward step to the first, and the decisions behind its times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.blocks.lattice import Lattice, at

Times = NDArray[np.int32]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]
Drop = tuple[int, Flags]
"""An axis (a value) and where it pays to drop that value."""

INFEASIBLE: Final = 2**29
"""Time units of what is impossible."""


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
    """

    times: Times
    stages: tuple[tuple[tuple[Rerun, ...], tuple[Drop, ...]], ...]


def run_sweep(lattice: Lattice, limits: NDArray[np.int64]) -> Sweep:
    """Least backward times within each of ``limits`` (units at the peak of the backward)."""
    sizes = lattice.bytes_by_set
    times = np.zeros(len(limits), np.int32)
    stages = []
    for j in reversed(range(len(lattice.members))):
        used = sizes[(0,) * (len(lattice.values) - lattice.width[j])]
        times, gone = _step(lattice, j, times, used, limits)
        reruns = [_rerun(lattice, j, row, times, used, limits) for row in reversed(lattice.members[j])]
        stages.append((tuple(reversed(reruns)), gone))
    return Sweep(times, tuple(reversed(stages)))


def _step(
    lattice: Lattice, j: int, after: Times, used: NDArray[np.int64], limits: NDArray[np.int64]
) -> tuple[Times, tuple[Drop, ...]]:
    """From the sets that stay after step j to the sets before it."""
    step, bits = lattice.scale.steps[j], lattice.width[j]
    fresh = bits - (after.ndim - 1)
    stay = used[(0,) * fresh]
    after = np.where(stay[..., None] + step.tail > limits, np.int32(INFEASIBLE), after)
    times = np.full((2,) * bits + (len(limits),), INFEASIBLE, np.int32)
    reads = lattice.axes(j, step.reads)
    times[tuple(int(axis in reads) for axis in range(fresh))] = after
    gone = []
    for axis in (axis for axis in reads if axis >= fresh):
        kept, dropped = times[at(bits, {axis: 1})], times[at(bits, {axis: 0})]
        gone.append((axis, dropped < kept))
        np.minimum(kept, dropped, out=kept)
    for axis in reads:
        times[at(bits, {axis: 0})] = INFEASIBLE
    np.copyto(times, INFEASIBLE, where=used[..., None] + step.during > limits)
    return times, tuple(gone)


def _rerun(
    lattice: Lattice,
    j: int,
    row: tuple[int, ...],
    times: Times,
    used: NDArray[np.int64],
    limits: NDArray[np.int64],
) -> Rerun:
    """Before step j, a row may run where all that it reads is alive and nothing that it writes."""
    ops, units, bits = lattice.problem.ops, lattice.scale.value_units, lattice.width[j]
    writes = lattice.axes(j, ops[row[-1]].writes)
    before = lattice.scale.steps[j - 1].after if j else lattice.scale.gradient_in_units
    best, drops, reads = times, [], dict[int, int]()
    if len(writes) == 1:
        best = best[at(bits, {writes[0]: 1})]
    for c in reversed(row):
        inner = {d for k in row[:-1] for d in ops[k].writes if not lattice.has_axis(d)}
        fresh = [axis for axis in lattice.axes(j, ops[c].reads) if axis not in reads]
        made = dict.fromkeys(writes, int(c == row[-1]))
        aside = sum(units[d] for d in ops[c].writes if not lattice.axes(j, (d,)))
        aside += sum(units[d] for d in ops[c].reads if d in inner)
        aside -= max((units[d] for d in ops[c].overwrites if d in inner), default=0)  # it dies here
        room = limits - lattice.scale.temp_units[c] - aside - before
        level = used[at(bits, reads | dict.fromkeys(fresh, 1) | made)][..., None]
        over = _takeovers(lattice, j, c, fresh)
        if over:
            best = _where_it_fits(best, level, room, over)
        for axis in (*(writes if c == row[-1] and len(writes) > 1 else ()), *fresh):
            kept, dropped = best[at(bits, {axis: 1})], best[at(bits, {axis: 0})]
            drops.append((axis, dropped < kept))
            best = np.minimum(kept, dropped)
        reads |= dict.fromkeys(fresh, 1)
        best = best + np.int32(lattice.scale.time_units[c])
        if not over:
            np.copyto(best, INFEASIBLE, where=level > room)
    target = times[at(bits, reads | dict.fromkeys(writes, 0))]
    runs = best < target
    np.minimum(target, best, out=target)
    return Rerun(row, tuple(reads), writes, runs, tuple(drops))


def _takeovers(lattice: Lattice, j: int, c: int, fresh: list[int]) -> dict[int, int]:
    """The axes of what op c may write its output over, if that goes with it, and the units that this saves.

    That it dies there is taken for granted: the simulator knows.
    """
    units = lattice.scale.value_units
    over = ((axis, units[d]) for d in lattice.problem.ops[c].overwrites for axis in lattice.axes(j, (d,)))
    return {axis: size for axis, size in over if axis in fresh}


def _where_it_fits(
    best: Times, level: NDArray[np.int64], room: NDArray[np.int64], over: dict[int, int]
) -> Times:
    """Times from the sets after an op, where what is alive meanwhile fits.

    ``level`` is alive with all that the op reads and makes; less, where it writes over what is gone then.
    """
    fits = np.broadcast_to(level <= room, best.shape).copy()
    for axis, units in over.items():
        fits[at(best.ndim - 1, {axis: 0})] = level - units <= room
    return np.where(fits, best, np.int32(INFEASIBLE))


@dataclass(frozen=True)
class Decoded:
    """What runs again in many ways to run a block: ``runs[i, way]`` says whether row i of ops does.

    ``rows``: the step before which it would run, and the ops.
    """

    rows: tuple[tuple[int, tuple[int, ...]], ...]
    runs: Flags

    def key(self, way: int) -> bytes:
        """Equal for ways that run the same again."""
        return self.runs[:, way].tobytes()

    def recomputations(self, way: int, steps: int) -> tuple[tuple[int, ...], ...]:
        """For each of the block's steps the ops that run before it."""
        again: list[tuple[int, ...]] = [()] * steps
        for number in np.flatnonzero(self.runs[:, way]).tolist():
            step, ops = self.rows[number]
            again[step] += ops
        return tuple(again)


def decode(lattice: Lattice, sweep: Sweep, saved: Sequence[int], limits: Sequence[int]) -> Decoded:
    """The decisions behind the times of some sets (flat indexes), each within a limit (its place)."""
    count = len(lattice.values)
    sets, within = np.array(saved, np.int64), np.array(limits, np.int64)
    alive = sets[:, None] >> np.arange(count - 1, -1, -1) & 1
    every = np.arange(len(sets))
    rows: list[tuple[int, tuple[int, ...]]] = []
    found: list[Flags] = []
    for j, (reruns, gone) in enumerate(sweep.stages):
        alive = alive[:, alive.shape[1] - lattice.width[j] :]
        for rerun in reruns:
            possible = alive[:, rerun.reads].all(axis=1) & ~alive[:, rerun.writes].any(axis=1)
            ways = np.flatnonzero(possible)
            ways = ways[_flags(rerun.runs, alive, ways, within)]
            rows.append((j, rerun.ops))
            found.append(np.zeros(len(sets), bool))
            if len(ways):
                found[-1][ways] = True
                for axis in rerun.writes:
                    alive[ways, axis] = 1
                _drop(rerun.drops, alive, ways, within)
        _drop(gone, alive, every, within)
    return Decoded(tuple(rows), np.array(found, bool).reshape(len(rows), len(sets)))


def _flags(flags: Flags, alive: Integers, ways: Integers, limits: Integers) -> Flags:
    """The flags of some ways at what is alive in them; an axis of length 1 does not tell."""
    if not len(ways):
        return np.zeros(0, bool)
    flags = np.ascontiguousarray(flags)
    steps = np.array(flags.strides[:-1], np.int64) * (np.array(flags.shape[:-1]) > 1)  # of a byte each
    found: Flags = flags.reshape(-1)[alive[ways, : len(steps)] @ steps + limits[ways]]
    return found


def _drop(drops: tuple[Drop, ...], alive: Integers, ways: Integers, limits: Integers) -> None:
    """What was decided last comes first: its flags take the earlier ones as decided."""
    for axis, flags in reversed(drops):
        alive[ways[_flags(flags, alive, ways, limits)], axis] = 0

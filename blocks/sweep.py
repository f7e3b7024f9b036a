"""One sweep of a lattice from the last backward step to the first, and the decisions behind its times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.blocks.lattice import Lattice, at

Times = NDArray[np.int32]
Flags = NDArray[np.bool_]
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


def recomputations(lattice: Lattice, sweep: Sweep, saved: int, limit: int) -> tuple[tuple[int, ...], ...]:
    """For each step the ops that run before it, from the set with flat index ``saved``."""
    alive = [saved >> axis & 1 for axis in reversed(range(len(lattice.values)))]
    recompute = []
    for j, (reruns, gone) in enumerate(sweep.stages):
        alive = alive[len(alive) - lattice.width[j] :]
        ran: list[int] = []
        for rerun in reruns:
            possible = all(alive[a] for a in rerun.reads) and not any(alive[a] for a in rerun.writes)
            if possible and _flag(rerun.runs, alive, limit):
                ran += rerun.ops
                for axis in rerun.writes:
                    alive[axis] = 1
                _drop(rerun.drops, alive, limit)
        _drop(gone, alive, limit)
        recompute.append(tuple(ran))
    return tuple(recompute)


def _flag(flags: Flags, alive: list[int], limit: int) -> bool:
    place = tuple(bit if size > 1 else 0 for bit, size in zip(alive, flags.shape, strict=False))
    return bool(flags[(*place, limit)])


def _drop(drops: tuple[Drop, ...], alive: list[int], limit: int) -> None:
    """What was decided last comes first: its flags take the earlier ones as decided."""
    for axis, flags in reversed(drops):
        if _flag(flags, alive, limit):
            alive[axis] = 0

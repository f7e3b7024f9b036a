"""The decisions behind the times of a sweep: what runs again, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridremat.blocks.lattice import Lattice
from hybridremat.blocks.sweep import Drop, Flags, Sweep

Integers = NDArray[np.int64]


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

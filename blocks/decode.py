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
    alive, within = np.array(saved, np.int64), np.array(limits, np.int64)
    every = np.arange(len(alive))
    rows: list[tuple[int, tuple[int, ...]]] = []
    found: list[Flags] = []
    for j, (reruns, gone) in enumerate(sweep.stages):
        bits = lattice.width[j]
        alive &= (1 << bits) - 1  # the first axes are of no use any more
        for rerun in reruns:
            reads, writes = _members(rerun.reads, bits), _members(rerun.writes, bits)
            ways = np.flatnonzero(alive & (reads | writes) == reads)
            ways = ways[_flags(rerun.runs, alive[ways], within[ways])]
            rows.append((j, rerun.ops))
            found.append(np.zeros(len(alive), bool))
            if len(ways):
                found[-1][ways] = True
                alive[ways] |= writes
                _drop(rerun.drops, alive, ways, within)
        _drop(gone, alive, every, within)
    return Decoded(tuple(rows), np.array(found, bool).reshape(len(rows), len(alive)))


def _members(axes: Sequence[int], bits: int) -> int:
    """The set of the values of some axes."""
    return sum(1 << (bits - 1 - axis) for axis in axes)


def _flags(flags: Flags, sets: Integers, limits: Integers) -> Flags:
    """The flags of some sets within limits; an axis of length 1 does not tell."""
    bits = flags.ndim - 1
    for place in (bits - 1 - axis for axis, length in enumerate(flags.shape[:-1]) if length == 1):
        sets = sets >> (place + 1) << place | sets & ((1 << place) - 1)
    found: Flags = flags.reshape(-1)[sets * flags.shape[-1] + limits]
    return found


def _drop(drops: tuple[Drop, ...], alive: Integers, ways: Integers, limits: Integers) -> None:
    """What was decided last comes first: its flags take the earlier ones as decided."""
    for axis, flags in reversed(drops):
        gone = ways[_flags(flags, alive[ways], limits[ways])]
        alive[gone] &= ~_members((axis,), flags.ndim - 1)

"""What each set of saved values costs in the forward: saved bytes, peak, and time of optional ops.

Vectors over all sets at once, in the order of the flat sets of :class:`~hybridremat.blocks.lattice.Lattice`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridremat.blocks.lattice import Lattice

Sizes = NDArray[Any]
Marks = NDArray[np.bool_]


@dataclass(frozen=True)
class ForwardCosts:
    """Units of saved bytes (outputs included), of the forward peak and of time, by set of saved values.

    ``runs`` says for each optional op in which sets it runs in the forward: where its value is saved, or an
    optional op that runs reads it.
    """

    saved: Sizes
    peak: Sizes
    time: Sizes
    runs: dict[int, Marks]


def forward_costs(lattice: Lattice) -> ForwardCosts:
    """Work out the forward of every set."""
    problem, scale = lattice.problem, lattice.scale
    count = len(lattice.values)
    sets = np.arange(1 << count)
    bits: dict[int, Marks] = {}
    for axis, twins in enumerate(lattice.values):
        bits |= dict.fromkeys(twins, (sets >> (count - 1 - axis) & 1).astype(bool))
    runs = _runs(lattice, bits, len(sets))
    saved = np.full(len(sets), sum(scale.value_units[d] for d in problem.outputs), np.int64)
    for d, chosen in bits.items():
        if d not in problem.outputs:
            saved += scale.value_units[d] * chosen
    kind = lattice.units_kind
    peak, level, part = np.zeros(len(sets), kind), np.empty(len(sets), kind), np.empty(len(sets), kind)
    for k, op in enumerate(problem.ops):
        level[:] = kind(scale.temp_units[k]) * runs[k] if op.optional else scale.temp_units[k]
        for d, c in lattice.producer.items():
            if c <= k:
                alive = _alive(lattice, d, k, bits, runs, len(sets))
                level += np.multiply(alive, kind(scale.value_units[d]), out=part)
        if op.overwrites:
            over = _writes_over(lattice, k, bits, runs, len(sets))
            level -= np.multiply(over, kind(scale.value_units[op.overwrites[0]]), out=part)
        np.maximum(peak, level, out=peak)
    time = np.zeros(len(sets), np.int64)
    for c, chosen in runs.items():
        time += scale.time_units[c] * chosen
    return ForwardCosts(saved, peak, time, runs)


def _runs(lattice: Lattice, bits: dict[int, Marks], size: int) -> dict[int, Marks]:
    ops = lattice.problem.ops
    runs: dict[int, Marks] = {}
    for c in reversed(range(len(ops))):
        if ops[c].optional:
            runs[c] = np.zeros(size, bool)
            for d in ops[c].writes:
                if d in bits:
                    runs[c] |= bits[d]
                for u, chosen in runs.items():
                    if d in ops[u].reads:
                        runs[c] |= chosen
    return runs


def _writes_over(
    lattice: Lattice, k: int, bits: dict[int, Marks], runs: dict[int, Marks], size: int
) -> Marks:
    """In which sets op k runs and writes its output over something."""
    over = np.zeros(size, bool)
    for d in lattice.problem.ops[k].overwrites:
        over |= ~np.broadcast_to(_alive(lattice, d, k + 1, bits, runs, size), size)
    return over & runs.get(k, True)


def _alive(
    lattice: Lattice, d: int, k: int, bits: dict[int, Marks], runs: dict[int, Marks], size: int
) -> Marks | bool:
    """In which sets value d, made at or before op k, is alive at op k of the forward."""
    problem, c = lattice.problem, lattice.producer[d]
    if c == k:
        return runs.get(c, True)
    readers = [u for u in range(k, len(problem.ops)) if d in problem.ops[u].reads]
    stays = d in problem.outputs or d in problem.held_forward
    if c not in runs and (stays or any(u not in runs for u in readers)):
        return True
    alive = np.zeros(size, bool)
    for u in readers:
        alive |= runs[u]
    if c in runs and stays:
        alive |= runs[c]
    if d in bits:
        alive |= bits[d]
    return alive

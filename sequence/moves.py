"""What can be done at Opt[s,t,·], in slots: options of block s, and checkpoints after it.

Sizes are rounded up to slots, so what fits here fits in bytes. Rows count bytes *above* what the
blocks after t hold while (s,t) runs (see :func:`Moves.held`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridremat.sequence.problem import ChainProblem

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of one block, one entry each.

    Option ``number`` needs ``least`` slots, leaves all but ``saved`` of them to the blocks after it, and
    takes ``time`` nanoseconds, the block's forward included.
    """

    number: Integers
    saved: Integers
    least: Integers
    time: Integers


@dataclass(frozen=True, slots=True)
class Splits:
    """Checkpoints of one sub-chain (s,t), one entry each.

    A checkpoint at boundary ``at`` (j) needs ``least`` slots; (j,t) has ``carried`` slots less and (s,j−1)
    ``grown`` less; running s…j−1 takes ``time`` nanoseconds.
    """

    at: Integers
    least: Integers
    carried: Integers
    grown: Integers
    time: Integers


class Moves:
    """The moves of one chain in slots of ``unit`` bytes."""

    def __init__(self, problem: ChainProblem, unit: int) -> None:
        length = len(problem)
        self.length, self.unit = length, unit
        self._options = [
            _columns(b.options, "saved", "forward_peak", "backward_peak", "time") for b in problem.blocks
        ]
        self._solo = [_columns(b.solo, "backward_peak", "time") for b in problem.blocks]
        self._forward_time = np.array([b.forward_time for b in problem.blocks], np.int64)
        self._boundary = np.array(problem.boundary_bytes, np.int64)
        self._plain_peak = np.array(problem.plain_peak, np.int64)
        self._gradient = problem.gradient_bytes
        self._released = np.array(problem.released_bytes or (0,) * length, np.int64)
        self._backward_held = np.array(problem.later_gradients, np.int64) + problem.tangent_bytes
        # held[t]: bytes that exist while a sub-chain ending at t runs, whatever it does. Only the
        # chain's first forward (t = L−1) comes before the tangents.
        self._held = self._backward_held.copy()
        self._held[length - 1 :] -= problem.tangent_bytes

    def _slots(self, size: Integers) -> Integers:
        return -(-size // self.unit)

    def _forward_base(self, t: int, first: int, last: int) -> Integers:
        """Bytes beside the forwards of blocks first…last in (·,t): g_{t+1}, and released outputs."""
        released = self._released[first : last + 1]
        return self._gradient[t + 1] + (released if t == self.length - 1 else np.zeros_like(released))

    def options(self, s: int, t: int) -> Choices:
        """Ordinary options of block s within (s,t), without those that rounding to slots makes useless."""
        saved, forward_peak, backward_peak, time = self._options[s]
        forward = self._forward_base(t, s, s) + forward_peak
        backward = self._backward_held[s] - self._held[t] + backward_peak
        least = self._slots(np.maximum(np.maximum(forward, backward), saved))
        number = np.arange(len(saved))
        found = Choices(number, self._slots(saved), least, time + self._forward_time[s])
        order = np.lexsort((number, found.saved, found.least, found.time))
        return _take(found, order[_undominated(found.least[order], found.saved[order])])

    def solos(self, s: int) -> Choices:
        """Solo options of block s when it is re-run; the last block is never re-run."""
        backward_peak, time = self._solo[s]
        if s == self.length - 1:
            backward_peak = time = time[:0]
        least = self._slots(self._backward_held[s] - self._held[s] + backward_peak)
        return Choices(np.arange(len(time)), np.zeros_like(time), least, time)

    def splits(self, s: int, t: int) -> Splits:
        """Every checkpoint j of (s,t), s < j ≤ t."""
        at = np.arange(s + 1, t + 1)
        peak = np.maximum.accumulate(self._forward_base(t, s, t - 1) + self._plain_peak[s, s:t])
        carried = self._slots(self._boundary[s, s + 1 : t + 1])
        grown = self._slots(self._held[s:t] - self._held[t])
        least = np.maximum(self._slots(peak), np.maximum(carried, grown))
        return Splits(at, least, carried, grown, np.cumsum(self._forward_time[s:t]))


def _columns(rows: tuple[object, ...], *names: str) -> list[Integers]:
    return [np.array([getattr(row, name) for row in rows], np.int64) for name in names]


def _undominated(least: Integers, saved: Integers) -> Integers:
    """Indexes of entries that no earlier entry (earlier: not slower) equals or beats in both figures."""
    beats = (least[:, None] <= least[None, :]) & (saved[:, None] <= saved[None, :])
    return np.flatnonzero(~np.triu(beats, 1).any(axis=0))


def _take(choices: Choices, index: Integers) -> Choices:
    return Choices(choices.number[index], choices.saved[index], choices.least[index], choices.time[index])

"""What can be done at Opt[s,t,·], in slots: options of block s, and checkpoints after it.

Sizes are rounded up to slots, so what fits here fits in bytes. Rows count bytes *above* what the
blocks after t hold while (s,t) runs (see :func:`Transitions.held`).

What is free when a skip value has died (:mod:`hybridremat.sequence.skip_liveness`) counts as less needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridremat.sequence.chain_problem import ChainProblem
from hybridremat.sequence.skip_liveness import NO_SKIPS, SkipLiveness, SkipSet, members_of

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OptionTransitions:
    """Options of one block, one entry each.

    Option ``number`` needs ``least`` slots, leaves all but ``saved`` of them (below zero: more) to the blocks
    after it, where the values ``rest`` end, and takes ``time`` nanoseconds, the block's forward included.
    """

    number: Integers
    saved: Integers
    least: Integers
    time: Integers
    rest: tuple[SkipSet, ...]


@dataclass(frozen=True, slots=True)
class CheckpointTransitions:
    """Checkpoints of one sub-chain (s,t), one entry each.

    A checkpoint at boundary ``at`` (j) needs ``least`` slots; (j,t) has ``carried`` slots less and the values
    ``later`` end there; (s,j−1) has ``grown`` less (below zero: more), and ``earlier`` end; running s…j−1
    takes ``time`` nanoseconds.
    """

    at: Integers
    least: Integers
    carried: Integers
    grown: Integers
    time: Integers
    later: tuple[SkipSet, ...]
    earlier: tuple[SkipSet, ...]


class SkipUse(NamedTuple):
    """What an option does with far values, by rank: leaves those it made alone, touches those that enter."""

    unread: frozenset[int]
    read: frozenset[int]

    def covers(self, other: SkipUse) -> bool:
        """Whether it lets go of as much as another."""
        return self.unread >= other.unread and self.read <= other.read


NEVER: Final = 1 << 40
"""More slots than there are."""


class _After(NamedTuple):
    """What ends in the rest, bytes that nobody needs there, bytes free in the block's backward."""

    rest: SkipSet
    dead: int
    spared: int


class Transitions:
    """The moves of one chain in slots of ``unit`` bytes."""

    def __init__(self, problem: ChainProblem, unit: int) -> None:
        length = len(problem)
        self.length, self.unit = length, unit
        self.far = SkipLiveness(problem)
        self._kinds = [_distinct([SkipUse(o.unread, o.read) for o in b.options]) for b in problem.blocks]
        self._solo_kinds = [_distinct([SkipUse(frozenset(), o.read) for o in b.solo]) for b in problem.blocks]
        self._options = [
            _columns(b.options, "saved", "forward_peak", "backward_peak", "time") for b in problem.blocks
        ]
        self._late = [np.array([o.rerun_only for o in b.options], bool) for b in problem.blocks]
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

    def options(self, s: int, t: int, ending: SkipSet = NO_SKIPS) -> OptionTransitions:
        """Ordinary options of block s within (s,t), without those that rounding to slots makes useless."""
        saved, forward_peak, backward_peak, time = self._options[s]
        kind, kinds = self._kinds[s]
        after = [self._after(s, t, ending, k) for k in kinds]
        forward = self._forward_base(t, s, s) + forward_peak
        backward = (
            self._backward_held[s] - self._held[t] + backward_peak - _of([a.spared for a in after], kind)
        )
        saved = self._slots(saved - _of([a.dead for a in after], kind))
        least = np.maximum(np.maximum(self._slots(np.maximum(forward, backward)), saved), 0)
        if t == self.length - 1:  # the step's first forward, and what it saves waits for the backward
            least[self._late[s]] = NEVER
        time = time + self._forward_time[s]
        order = np.lexsort((np.arange(len(saved)), saved, least, time))
        useful = order[_undominated(least[order], saved[order], kind[order], kinds)]
        rest = tuple(after[k].rest for k in kind[useful].tolist())
        return OptionTransitions(useful, saved[useful], least[useful], time[useful], rest)

    def solos(self, s: int, ending: SkipSet = NO_SKIPS) -> OptionTransitions:
        """Solo options of block s when it is re-run; the last block is never re-run."""
        backward_peak, time = self._solo[s]
        kind, kinds = self._solo_kinds[s]
        if s == self.length - 1:
            backward_peak = time = kind = time[:0]
        spared = _of([self._after(s, s, ending, k).spared for k in kinds], kind)
        least = self._slots(self._backward_held[s] - self._held[s] + backward_peak - spared)
        none = (NO_SKIPS,) * len(time)
        return OptionTransitions(np.arange(len(time)), np.zeros_like(time), np.maximum(least, 0), time, none)

    def rests(self, s: int, t: int, ending: SkipSet) -> frozenset[SkipSet]:
        """What can end in (s+1,t) after an option of block s."""
        return frozenset(self._after(s, t, ending, kind).rest for kind in self._kinds[s][1])

    def _after(self, s: int, t: int, ending: SkipSet, kind: SkipUse) -> _After:
        """What an option of this kind leaves to the blocks after s."""
        far = self.far
        if not far.any:
            return _After(NO_SKIPS, 0, 0)
        made, entering = far.made_in(s), far.entering(s)
        spared = ending & ~members_of(entering[rank] for rank in kind.read)
        free = spared | members_of(made[rank] for rank in kind.unread)
        rest = far.within(s + 1, t, free)
        return _After(rest, far.bytes(free & ~rest), far.bytes(spared))

    def splits(self, s: int, t: int, ending: SkipSet = NO_SKIPS) -> CheckpointTransitions:
        """Every checkpoint j of (s,t), s < j ≤ t."""
        at = range(s + 1, t + 1)
        unread, ended, later, earlier = self._ends(s, t, ending)
        plain = self._plain_peak[s, s:t] - np.concatenate(([0], unread[:-1]))
        peak = np.maximum.accumulate(self._forward_base(t, s, t - 1) + plain)
        carried = self._slots(self._boundary[s, s + 1 : t + 1] - unread)
        grown = self._slots(self._held[s:t] - self._held[t] - ended)
        least = np.maximum(self._slots(peak), np.maximum(carried, grown))
        time = np.cumsum(self._forward_time[s:t])
        return CheckpointTransitions(np.array(at), least, carried, grown, time, later, earlier)

    def _ends(
        self, s: int, t: int, ending: SkipSet
    ) -> tuple[Integers, Integers, tuple[SkipSet, ...], tuple[SkipSet, ...]]:
        """For every checkpoint j: bytes at j not read, bytes free before j, ends in (j,t) and in (s,j−1)."""
        far = self.far
        if not far.any:
            none = np.zeros(t - s, np.int64)
            return none, none, (NO_SKIPS,) * (t - s), (NO_SKIPS,) * (t - s)
        fresh = [(j, far.fresh(s, j)) for j in range(s + 1, t + 1)]
        unread = [far.bytes(far.unread(j, t, values)) for j, values in fresh]
        later, earlier = self.split_ends(s, t, ending)
        ended = [far.bytes(ending & ~values) for values in earlier]
        return np.array(unread, np.int64), np.array(ended, np.int64), later, earlier

    def split_ends(self, s: int, t: int, ending: SkipSet) -> tuple[tuple[SkipSet, ...], tuple[SkipSet, ...]]:
        """For every checkpoint j what ends in (j,t) and in (s,j−1)."""
        far, places = self.far, range(s + 1, t + 1)
        earlier = tuple(far.within(s, j - 1, ending) for j in places)
        later = tuple(
            far.within(j, t, ending & ~first | far.fresh(s, j))
            for j, first in zip(places, earlier, strict=True)
        )
        return later, earlier


def _columns(rows: tuple[object, ...], *names: str) -> list[Integers]:
    return [np.array([getattr(row, name) for row in rows], np.int64) for name in names]


def _distinct(items: list[SkipUse]) -> tuple[Integers, tuple[SkipUse, ...]]:
    """The kind of every item, and the kinds."""
    kinds: dict[SkipUse, int] = {}
    kind = [kinds.setdefault(item, len(kinds)) for item in items]
    return np.array(kind, np.int64), tuple(kinds)


def _of(figures: list[int], kind: Integers) -> Integers:
    """The figure of every item, from those of the kinds."""
    return np.array(figures, np.int64)[kind]


def _undominated(least: Integers, saved: Integers, kind: Integers, kinds: tuple[SkipUse, ...]) -> Integers:
    """Indexes of entries that no earlier entry (earlier: not slower) equals or beats in both figures.

    One that lets go of less does not beat.
    """
    beats = (least[:, None] <= least[None, :]) & (saved[:, None] <= saved[None, :])
    if len(kinds) > 1:
        covers = np.array([[own.covers(other) for other in kinds] for own in kinds])
        beats &= covers[kind[:, None], kind[None, :]]
    return np.flatnonzero(~np.triu(beats, 1).any(axis=0))

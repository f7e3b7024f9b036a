"""The transitions at Opt[s,t,·], in slots: options of block s, and checkpoints after it.

Sizes are rounded up to slots, so what fits here fits in bytes. Rows count bytes *above* what the
blocks after t hold while (s,t) runs (``held``).

What is free once a skip value has died (:mod:`hybridremat.sequence.skip_liveness`) is not charged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hybridremat.sequence.chain_problem import ChainProblem
from hybridremat.sequence.least_times import Integers, Row
from hybridremat.sequence.skip_liveness import (
    NO_SKIPS,
    AfterOption,
    AroundCheckpoints,
    SkipLiveness,
    SkipSet,
    SkipUse,
    members_of,
)

TOO_MANY_SLOTS: Final = 1 << 40
"""More slots than there are."""

NOTHING_DIES: Final = AfterOption(NO_SKIPS, 0, 0)


@dataclass(frozen=True, slots=True)
class OptionTransitions:
    """Options of one block, one entry each.

    It needs ``least`` slots, leaves all but ``saved`` of them (below zero: more) to the blocks after it,
    where the values ``rest`` die, and takes ``time`` ticks, the block's forward included.
    """

    saved: Integers
    least: Integers
    time: Row
    rest: tuple[SkipSet, ...]


@dataclass(frozen=True, slots=True)
class CheckpointTransitions:
    """Checkpoints of one sub-chain (s,t), one entry each.

    A checkpoint at boundary ``at`` (j) needs ``least`` slots; (j,t) has ``carried`` slots less and the values
    ``later`` die there; (s,j−1) has ``grown`` less (below zero: more), and ``earlier`` die. Blocks s…j−1 run
    forward before that.
    """

    at: Integers
    least: Integers
    carried: Integers
    grown: Integers
    later: tuple[SkipSet, ...]
    earlier: tuple[SkipSet, ...]


class Transitions:
    """The transitions of one chain in slots of ``unit`` bytes and ticks of ``tick`` nanoseconds."""

    def __init__(self, problem: ChainProblem, skips: SkipLiveness, unit: int, tick: int = 1) -> None:
        length = len(problem)
        self.length, self.unit, self.tick = length, unit, tick
        self.skips = skips
        self._uses = [
            _distinct([self._use(i, o.unread, o.read) for o in block.options])
            for i, block in enumerate(problem.blocks)
        ]
        self._solo_uses = [
            _distinct([self._use(i, frozenset(), o.read) for o in block.solo])
            for i, block in enumerate(problem.blocks)
        ]
        figures = "saved", "forward_peak", "backward_peak"
        self._options = [_columns(b.options, *figures) for b in problem.blocks]
        self._rerun_only = [np.array([o.rerun_only for o in b.options], bool) for b in problem.blocks]
        self._solo_peaks = [_columns(b.solo, "backward_peak")[0] for b in problem.blocks]
        self._times = [self._ticks([b.forward_time + o.time for o in b.options]) for b in problem.blocks]
        self._solo_times = [self._ticks([o.time for o in b.solo]) for b in problem.blocks]
        forwards = self._ticks([b.forward_time for b in problem.blocks])
        self._forward_ticks = np.concatenate(([0], np.cumsum(forwards, dtype=np.float64)))
        self._boundary = np.array(problem.boundary_bytes, np.int64)
        self._plain_peak = np.array(problem.plain_peak, np.int64)
        self._gradient = problem.gradient_bytes
        self._released = np.array(problem.released_bytes or (0,) * length, np.int64)
        self._backward_held = np.array(problem.later_gradients, np.int64) + problem.tangent_bytes
        # held[t]: bytes that exist while a sub-chain that ends at t runs, whatever it does. Only the
        # chain's first forward (t = L−1) comes before the tangents.
        self._held = self._backward_held.copy()
        self._held[length - 1 :] -= problem.tangent_bytes

    def _ticks(self, times: Sequence[int]) -> Row:
        """Nanoseconds rounded to ticks."""
        return np.array([(2 * time + self.tick) // (2 * self.tick) for time in times], np.float32)

    def forward_time(self, s: int, t: int) -> float:
        """Ticks of one plain forward of blocks s…t."""
        return float(self._forward_ticks[t + 1] - self._forward_ticks[s])

    def _slots(self, size: Integers) -> Integers:
        return -(-size // self.unit)

    def _forward_base(self, t: int, first: int, last: int) -> Integers:
        """Bytes beside the forwards of blocks first…last in (·,t): g_{t+1}, and released outputs."""
        released = self._released[first : last + 1]
        return self._gradient[t + 1] + (released if t == self.length - 1 else np.zeros_like(released))

    def options(self, s: int, t: int, dying: SkipSet = NO_SKIPS) -> OptionTransitions:
        """Ordinary options of block s within (s,t)."""
        saved, forward_peak, backward_peak = self._options[s]
        use, uses = self._uses[s]
        after = [self._after(s, t, dying, u) for u in uses]
        forward = self._forward_base(t, s, s) + forward_peak
        backward = self._backward_held[s] - self._held[t] + backward_peak
        if self.skips.any:
            backward = backward - _figures_of([a.spared for a in after], use)
            saved = saved - _figures_of([a.dead for a in after], use)
        saved = self._slots(saved)
        least = np.maximum(np.maximum(self._slots(np.maximum(forward, backward)), saved), 0)
        if t == self.length - 1:  # the step's first forward, and what it saves waits for the backward
            least[self._rerun_only[s]] = TOO_MANY_SLOTS
        rests = [a.rest for a in after]
        rest = tuple(rests[u] for u in use.tolist()) if self.skips.any else (NO_SKIPS,) * len(use)
        return OptionTransitions(saved, least, self._times[s], rest)

    def solos(self, s: int, dying: SkipSet = NO_SKIPS) -> OptionTransitions:
        """Solo options of block s when it is re-run; the last block is never re-run."""
        peaks = self._solo_peaks[s]
        use, uses = self._solo_uses[s]
        spared = _figures_of([self._after(s, s, dying, u).spared for u in uses], use)
        least = self._slots(self._backward_held[s] - self._held[s] + peaks - spared)
        least = np.maximum(least, TOO_MANY_SLOTS if s == self.length - 1 else 0)
        return OptionTransitions(np.zeros_like(peaks), least, self._solo_times[s], (NO_SKIPS,) * len(peaks))

    def rest_of(self, s: int, t: int, dying: SkipSet, option: int) -> SkipSet:
        """What dies in (s+1,t) after one option of block s."""
        use, uses = self._uses[s]
        return self._after(s, t, dying, uses[use[option]]).rest

    def rests(self, s: int, t: int, dying: SkipSet) -> frozenset[SkipSet]:
        """What can die in (s+1,t) after an option of block s."""
        return frozenset(self._after(s, t, dying, use).rest for use in self._uses[s][1])

    def _use(self, block: int, unread: frozenset[int], read: frozenset[int]) -> SkipUse:
        """An option's use of skip values, from ranks among those of its block."""
        if not self.skips.any:
            return SkipUse(NO_SKIPS, NO_SKIPS)
        made, entering = self.skips.made_in(block), self.skips.entering(block)
        return SkipUse(members_of(made[rank] for rank in unread), members_of(entering[rank] for rank in read))

    def _after(self, s: int, t: int, dying: SkipSet, use: SkipUse) -> AfterOption:
        """What an option of this use of skip values leaves to the blocks after s."""
        return self.skips.after_option(s, t, dying, use) if self.skips.any else NOTHING_DIES

    def checkpoints(self, s: int, t: int, dying: SkipSet = NO_SKIPS) -> CheckpointTransitions:
        """Every checkpoint j of (s,t), s < j ≤ t."""
        at = range(s + 1, t + 1)
        around = self._around(s, t, dying)
        unread, ended = np.array(around.unread, np.int64), np.array(around.ended, np.int64)
        plain = self._plain_peak[s, s:t] - np.concatenate(([0], unread[:-1]))
        peak = np.maximum.accumulate(self._forward_base(t, s, t - 1) + plain)
        carried = self._slots(self._boundary[s, s + 1 : t + 1] - unread)
        grown = self._slots(self._held[s:t] - self._held[t] - ended)
        least = np.maximum(self._slots(peak), np.maximum(carried, grown))
        return CheckpointTransitions(np.array(at), least, carried, grown, around.later, around.earlier)

    def dying_around(self, s: int, t: int, dying: SkipSet, j: int) -> tuple[SkipSet, SkipSet]:
        """What dies in (j,t) and in (s,j−1) around a checkpoint j."""
        if not self.skips.any:
            return NO_SKIPS, NO_SKIPS
        later, earlier = self.skips.dying_around(s, t, dying)
        return later[j - s - 1], earlier[j - s - 1]

    def _around(self, s: int, t: int, dying: SkipSet) -> AroundCheckpoints:
        if self.skips.any:
            return self.skips.around_checkpoints(s, t, dying)
        return AroundCheckpoints((0,) * (t - s), (0,) * (t - s), (NO_SKIPS,) * (t - s), (NO_SKIPS,) * (t - s))


def _columns(rows: tuple[object, ...], *names: str) -> list[Integers]:
    return [np.array([getattr(row, name) for row in rows], np.int64) for name in names]


def _distinct(items: list[SkipUse]) -> tuple[Integers, tuple[SkipUse, ...]]:
    """For every item its number among the distinct ones, and these."""
    distinct: dict[SkipUse, int] = {}
    numbers = [distinct.setdefault(item, len(distinct)) for item in items]
    return np.array(numbers, np.int64), tuple(distinct)


def _figures_of(figures: list[int], use: Integers) -> Integers:
    """The figure of every option, from those of the distinct uses of skip values."""
    return np.array(figures, np.int64)[use]

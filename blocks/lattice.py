"""All ways to run one block at given peaks, by an exact dynamic program over sets of values that are alive.

The backward of a block is a fixed order of events: before each step, every op that the step can need runs
again or does not; a value may go as soon as it was read. The state between events is the set of values that
are alive, one bit for each that the backward can use, and the least time from there to the end is known for
all sets at once: one numpy array with an axis of length 2 for each value, and one axis for the peak limits.
So one sweep from the last step to the first answers, for every set of saved values, what CP-SAT answers for
one pair of limits. It grows as 2 to the number of values; two rules keep that number low.

Twins, which one op makes and the same readers read, share a bit. Where asked (:class:`Fusing`), an op whose
only output goes to the next op alone, which makes no more bytes of it, runs together with that one: its
output is never kept. Saving what the next op makes instead is as good in every figure; only keeping such an
output from one step to another for its own sake is lost. In the largest blocks more ops run together, where
little is lost by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from hybridremat.blocks.scale import Scale
from hybridremat.blocks.types import BlockProblem, ForwardOp

MORE_BYTES: Final = 1.5
"""Times the bytes that it reads, that an op makes at most which runs together with a cheap one before it."""

CHEAP: Final = 0.01
"""The share of the block's forward that a cheap op takes at most."""


class Fusing(Enum):
    """Which ops run together with the next one: each more than those before."""

    NONE = 0
    EQUAL = 1
    """Where that makes no more bytes; neither is optional."""
    OPTIONAL = 2
    """Optional ops as well, both of a pair: in the forward, or in the backward."""
    COARSE = 3
    """Cheap ones as well whose next op makes some bytes more: dropout, its mask."""


@dataclass
class Lattice:
    """The lattice of alive sets of one block.

    Attributes
    ----------
    values
        The values behind each axis, those that are of use the longest last: stage j knows the last
        ``width[j]`` axes.
    members
        For each step, the rows of ops that can run again before it.
    """

    problem: BlockProblem
    scale: Scale
    fusing: Fusing = Fusing.NONE
    values: tuple[tuple[int, ...], ...] = field(init=False)
    width: tuple[int, ...] = field(init=False)
    members: tuple[tuple[tuple[int, ...], ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        problem = self.problem
        self.producer = problem.producers()
        needed = [problem.ancestors(j) for j in range(len(problem.steps))]
        again = set[int]().union(*needed)
        readers: dict[int, list[int]] = {d: [] for d in self.producer}
        for c in sorted(again):
            for d in problem.ops[c].reads:
                readers[d].append(c)
        last: dict[int, int] = {}
        for j, (step, ops) in enumerate(zip(problem.steps, needed, strict=True)):
            for d in (*step.reads, *(d for c in ops for d in problem.ops[c].reads)):
                last[d] = j
        fuses = self.fusing is not Fusing.NONE
        passing = {c for c in again if fuses and self._passes(c, readers, last)}
        rows = self._rows(again, passing)
        self.members = tuple(tuple(row for row in rows if row[-1] in ops) for ops in needed)
        twins: dict[object, list[int]] = {}
        for d in sorted(last.keys() - {d for c in passing for d in problem.ops[c].writes}):
            steps = tuple(j for j, step in enumerate(problem.steps) if d in step.reads)
            kind = d in problem.outputs, d in problem.never_saved
            key = (self.producer[d], steps, tuple(readers[d]), kind)
            twins.setdefault(key, []).append(d)
        self.values = tuple(sorted(map(tuple, twins.values()), key=lambda ds: (last[ds[0]], ds)))
        self.width = tuple(sum(last[ds[0]] >= j for ds in self.values) for j in range(len(needed)))
        self._place = {d: axis for axis, ds in enumerate(self.values) for d in ds}

    def _passes(self, c: int, readers: dict[int, list[int]], last: dict[int, int]) -> bool:
        """Whether op c only works for the next, and runs together with it."""
        ops, units = self.problem.ops, self.scale.value_units
        used = [d for d in ops[c].writes if d in last]
        if len(used) != 1 or c + 1 == len(ops) or used[0] in self.problem.outputs:
            return False
        if readers[used[0]] != [c + 1] or any(used[0] in step.reads for step in self.problem.steps):
            return False
        never = self.problem.never_saved
        if used[0] not in never and not never.isdisjoint(ops[c + 1].writes):
            return False  # what the next op makes cannot be saved instead
        made = sum(units[d] for d in ops[c + 1].writes if d in last)
        return self._pairs(ops[c], ops[c + 1]) and made <= units[used[0]] * self._most_bytes(ops[c])

    def _pairs(self, first: ForwardOp, second: ForwardOp) -> bool:
        """Whether two ops may run together, whatever they make."""
        if not (first.recomputable and second.recomputable):
            return False
        wide = self.fusing.value >= Fusing.OPTIONAL.value
        return first.optional == second.optional and (wide or not first.optional)

    def _most_bytes(self, first: ForwardOp) -> float:
        """Times the bytes of its output that the op behind another makes at most."""
        cheap = first.time <= CHEAP * sum(op.time for op in self.problem.ops)
        return MORE_BYTES if cheap and self.fusing is Fusing.COARSE else 1.0

    def _rows(self, again: set[int], passing: set[int]) -> list[tuple[int, ...]]:
        """Recomputable ops in order, each that passes its output on in one row with the next."""
        rows: list[tuple[int, ...]] = []
        for c in sorted(again):
            if self.problem.ops[c].recomputable:
                joined = rows and c - 1 == rows[-1][-1] and c - 1 in passing
                rows[-1:] = [(*rows[-1], c)] if joined else [*rows[-1:], (c,)]
        return rows

    @property
    def exact(self) -> bool:
        """Whether sets tell all: they do not remember whether an op that may run only once has run."""
        return all(op.recomputable or not op.optional for op in self.problem.ops)

    @property
    def work(self) -> int:
        """Entries that a sweep touches for each limit."""
        return sum((len(ops) + 1) << bits for ops, bits in zip(self.members, self.width, strict=True))

    def axes(self, j: int, values: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of values in stage j's arrays, without those that are of no use any more."""
        shift = len(self.values) - self.width[j]
        return tuple(sorted({self._place[d] - shift for d in values if self._place.get(d, -1) >= shift}))

    def has_axis(self, value: int) -> bool:
        """Whether sets know if a value is alive."""
        return value in self._place

    @property
    def units_kind(self) -> type[np.int32] | type[np.int64]:
        """Numbers that hold what is alive, and how far it is over a limit."""
        return np.int32 if 2 * self.scale.most_units < 2**31 else np.int64


def at(bits: int, fixed: dict[int, int]) -> tuple[slice, ...]:
    """Where the given axes have the given values; the axes stay."""
    return tuple(slice(fixed[a], fixed[a] + 1) if a in fixed else slice(None) for a in range(bits))

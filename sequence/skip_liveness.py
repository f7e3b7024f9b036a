"""Liveness of skip values: which of them die within a sub-chain, since nobody but its blocks reads them.

Sub-chain (s,t) runs with x_s held. A skip value of x_s that is held for (s,t) alone, neither for a block
before s nor by the block that made it, is *dying*. Its bytes are free

- from the backward of its last reader on: for the blocks before its next reader at or after s;
- from the forward of a block on whose option does not read it in its backward, if no later block reads it.

A skip value made within (s,t) and read only after t is not needed at all when (s,t) runs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from hybridremat.sequence.chain_problem import ChainProblem

SkipSet = int
"""A set of skip values: bit n stands for value n of ``ChainProblem.skip_values``."""

NO_SKIPS: SkipSet = 0


class SkipUse(NamedTuple):
    """What an option does with skip values: which it makes stay unread, which others it reads."""

    unread: SkipSet
    read: SkipSet


class AfterOption(NamedTuple):
    """What dies in the rest, bytes that nobody needs there, bytes free in the block's backward."""

    rest: SkipSet
    dead: int
    spared: int


class AroundCheckpoints(NamedTuple):
    """For every checkpoint j: bytes at j not read, bytes free before j, dying in (j,t), in (s,j−1)."""

    unread: tuple[int, ...]
    ended: tuple[int, ...]
    later: tuple[SkipSet, ...]
    earlier: tuple[SkipSet, ...]


class SkipLiveness:
    """Who reads the skip values of one chain, and when.

    It remembers what it has worked out: the states of a table, its rows and those of another with coarser
    slots, and the decisions behind both ask the same.
    """

    def __init__(self, problem: ChainProblem) -> None:
        self._values = problem.skip_values
        self._length = length = len(problem)
        self.any = bool(self._values)
        self._made: list[list[int]] = [[] for _ in range(length)]
        self._entering: list[list[int]] = [[] for _ in range(length)]
        self._carried = [NO_SKIPS] * (length + 1)
        for n, skip in enumerate(self._values):
            self._made[skip.producer].append(n)
            for reader in skip.readers:
                self._entering[reader].append(n)
            for boundary in range(skip.producer + 1, skip.readers[-1] + 1):
                self._carried[boundary] |= 1 << n
        self.bytes = cache(self._bytes)
        self._read = cache(self._read_by)
        self.after_option = cache(self._after_option)
        self.dying_around = cache(self._dying_around)
        self.around_checkpoints = cache(self._around_checkpoints)

    def made_in(self, block: int) -> list[int]:
        """Skip values that a block makes."""
        return self._made[block]

    def entering(self, block: int) -> list[int]:
        """Skip values that a block reads and does not make."""
        return self._entering[block]

    def within(self, s: int, t: int, values: SkipSet) -> SkipSet:
        """Those of ``values`` that (s,t) reads."""
        return values & self._read(s)[t - s] if values and t >= s else NO_SKIPS

    def unread(self, block: int, t: int, values: SkipSet) -> SkipSet:
        """Those of ``values`` that no block from ``block`` to t reads."""
        return values & ~self.within(block, t, values)

    def fresh(self, s: int, j: int) -> SkipSet:
        """Skip values in boundary j that are not in boundary s."""
        return self._carried[j] & ~self._carried[s]

    def signature(self, s: int, t: int, dying: SkipSet) -> tuple[object, ...]:
        """All of ``dying`` that a row of (s,t) depends on: bytes, and who reads each."""
        return tuple(sorted((self._values[n].bytes, self._readers(n, s, t)) for n in _members(dying)))

    def pattern(self, block: int) -> tuple[object, ...]:
        """The skip values that a block makes: bytes, and who reads each."""
        made = self.made_in(block)
        return tuple((self._values[n].bytes, self._readers(n, block, self._length)) for n in made)

    def _after_option(self, s: int, t: int, dying: SkipSet, use: SkipUse) -> AfterOption:
        """What an option of block s of this use leaves to the blocks after it, within (s,t)."""
        spared = dying & ~use.read
        free = spared | use.unread
        rest = self.within(s + 1, t, free)
        return AfterOption(rest, self.bytes(free & ~rest), self.bytes(spared))

    def _dying_around(
        self, s: int, t: int, dying: SkipSet
    ) -> tuple[tuple[SkipSet, ...], tuple[SkipSet, ...]]:
        """What dies in (j,t) and in (s,j−1) around every checkpoint j, s < j ≤ t."""
        after = range(s + 1, t + 1)
        earlier = tuple(self.within(s, j - 1, dying) for j in after)
        free = (dying & ~values | self.fresh(s, j) for j, values in zip(after, earlier, strict=True))
        return tuple(self.within(j, t, values) for j, values in zip(after, free, strict=True)), earlier

    def _around_checkpoints(self, s: int, t: int, dying: SkipSet) -> AroundCheckpoints:
        later, earlier = self.dying_around(s, t, dying)
        unread = tuple(self.bytes(self.unread(j, t, self.fresh(s, j))) for j in range(s + 1, t + 1))
        return AroundCheckpoints(unread, tuple(self.bytes(dying & ~each) for each in earlier), later, earlier)

    def _bytes(self, values: SkipSet) -> int:
        """Bytes of some skip values."""
        return sum(self._values[n].bytes for n in _members(values))

    def _read_by(self, s: int) -> list[SkipSet]:
        """What (s,t) reads, for every t from s on."""
        read, known = [], NO_SKIPS
        for t in range(s, self._length):
            known |= members_of(self._entering[t])
            read.append(known)
        return read

    def _readers(self, n: int, s: int, t: int) -> tuple[tuple[int, int], ...]:
        """Distance of each reader of value n in (s,t), and the value's rank there."""
        return tuple((r - s, self._entering[r].index(n)) for r in self._values[n].readers if s <= r <= t)


def members_of(numbers: Iterable[int]) -> SkipSet:
    """The set of skip values with these numbers."""
    return sum(1 << n for n in numbers)


def _members(values: SkipSet) -> Iterator[int]:
    """The numbers of a set of skip values."""
    while values:
        lowest = values & -values
        yield lowest.bit_length() - 1
        values ^= lowest

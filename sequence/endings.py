"""Far values whose life ends within a sub-chain: nobody but its blocks reads them any more.

Sub-chain (s,t) runs with x_s held. A far value of x_s that is held for (s,t) alone, neither for a block
before s nor by the block that made it, is *ending*. Its bytes are free

- from the backward of its last reader on: for the blocks before its next reader at or after s;
- from the forward of a block on whose option does not touch it in its backward, if no later block reads it.

A far value made within (s,t) and read only after t is not needed at all when (s,t) runs again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from hybridremat.sequence.problem import ChainProblem

Ending = frozenset[int]
"""Numbers of far values, in the order of ``ChainProblem.far``."""

NOTHING: Ending = frozenset()


class FarReaders:
    """Who reads the far values of one chain, and when."""

    def __init__(self, problem: ChainProblem) -> None:
        self._far = problem.far
        self._length = len(problem)
        # next[n][k]: the first block at or after k that reads value n, L if none does
        self._next = [
            [next((r for r in far.readers if r >= k), self._length) for k in range(self._length + 1)]
            for far in self._far
        ]
        self._riding = [
            [n for n, far in enumerate(self._far) if far.producer < j <= far.readers[-1]]
            for j in range(self._length + 1)
        ]
        self._made: dict[int, list[int]] = {}
        self._entering: dict[int, list[int]] = {}
        for n, far in enumerate(self._far):
            self._made.setdefault(far.producer, []).append(n)
            for reader in far.readers:
                self._entering.setdefault(reader, []).append(n)

    @cached_property
    def any(self) -> bool:
        """Whether there are far values at all."""
        return bool(self._far)

    def made_in(self, block: int) -> list[int]:
        """Far values that a block makes."""
        return self._made.get(block, [])

    def bytes(self, values: Iterable[int]) -> int:
        """Bytes of some far values."""
        return sum(self._far[n].bytes for n in values)

    def entering(self, block: int) -> list[int]:
        """Far values that a block reads and does not make."""
        return self._entering.get(block, [])

    def within(self, s: int, t: int, values: Iterable[int]) -> Ending:
        """Those of ``values`` that (s,t) reads."""
        return frozenset(n for n in values if self._next[n][s] <= t)

    def unread(self, block: int, t: int, values: Iterable[int]) -> Ending:
        """Those of ``values`` that no block from ``block`` to t reads."""
        return frozenset(n for n in values if self._next[n][block] > t)

    def fresh(self, s: int, j: int) -> list[int]:
        """Far values in boundary j that are not in boundary s."""
        return [n for n in self._riding[j] if self._far[n].producer >= s]

    def signature(self, s: int, t: int, ending: Ending) -> tuple[object, ...]:
        """All of ``ending`` that a row of (s,t) depends on: bytes, and who reads each."""
        return tuple(sorted((self._far[n].bytes, self._readers(n, s, t)) for n in ending))

    def pattern(self, block: int) -> tuple[object, ...]:
        """The far values that a block makes: bytes, and who reads each."""
        made = self.made_in(block)
        return tuple((self._far[n].bytes, self._readers(n, block, self._length)) for n in made)

    def _readers(self, n: int, s: int, t: int) -> tuple[tuple[int, int], ...]:
        """Distance of each reader of value n in (s,t), and the value's rank there."""
        return tuple((r - s, self._entering[r].index(n)) for r in self._far[n].readers if s <= r <= t)

"""Executions of a graph's ops, and what is there at each of them: any op may run again, in any order.

An execution reads others, each that of an op which it needs. In what order they run is another question: a
move takes along what needs the moved one, or what it needs, so that each still reads the same execution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Dag:
    """Ops by number: bytes of their outputs, times of one execution, and the ops that each reads."""

    bytes: tuple[int, ...]
    times: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class There:
    """What is there under an order, by execution and by place.

    Attributes
    ----------
    level
        Bytes at each place.
    place, last
        Of each execution: its own place, and that of the last one that reads it.
    """

    level: Numbers
    place: Numbers
    last: Numbers

    def beyond(self, limit: int) -> int:
        """Bytes beyond a limit, summed over all places; 0: it fits."""
        return int(np.maximum(self.level - limit, 0).sum())


@dataclass(frozen=True, eq=False)
class Runs:
    """Executions of a graph.

    Attributes
    ----------
    dag
        The graph.
    ops
        The op of each execution.
    makers
        The executions that each reads, in the order of what its op reads.
    earlier
        The execution of the same op before it; None for the first. It and its readers run before.
    """

    dag: Dag
    ops: tuple[int, ...]
    makers: tuple[tuple[int, ...], ...]
    earlier: tuple[int | None, ...]

    @classmethod
    def once(cls, dag: Dag) -> Runs:
        """Each op once."""
        return cls(dag, tuple(range(len(dag.reads))), dag.reads, (None,) * len(dag.reads))

    @property
    def time(self) -> int:
        """Of all executions together."""
        return sum(self.dag.times[op] for op in self.ops)

    @property
    def again(self) -> list[int]:
        """The executions of ops that have run before, those that take most time first."""
        times = self.dag.times
        found = [run for run, before in enumerate(self.earlier) if before is not None]
        return sorted(found, key=lambda run: -times[self.ops[run]])

    @cached_property
    def readers(self) -> list[list[int]]:
        """The executions that read each."""
        return _turned(self.makers, len(self.ops))

    @cached_property
    def needs(self) -> list[set[int]]:
        """What has run before each: what it reads; of its op's execution before, that and its readers."""
        found = [set(makers) for makers in self.makers]
        for run, before in enumerate(self.earlier):
            if before is not None:
                found[run] |= {before, *self.readers[before]}
        return found

    @cached_property
    def needed_by(self) -> list[list[int]]:
        """What runs after each."""
        return _turned(self.needs, len(self.ops))

    @cached_property
    def bytes(self) -> Numbers:
        """Of each execution's output."""
        return np.array([self.dag.bytes[op] for op in self.ops], np.int64)

    @cached_property
    def _read(self) -> tuple[Numbers, Numbers, Numbers]:
        """The executions that are read, all readers one after the other, and where those of each begin."""
        read = [run for run, readers in enumerate(self.readers) if readers]
        counts = [len(self.readers[run]) for run in read]
        flat = [reader for run in read for reader in self.readers[run]]
        starts = np.cumsum([0, *counts[:-1]], dtype=np.int64)[: len(read)]
        return np.array(read, np.int64), np.array(flat, np.int64), starts

    def there(self, order: Numbers) -> There:
        """What is there under an order."""
        count = len(self.ops)
        place = np.empty(count, np.int64)
        place[order] = np.arange(count)
        last = place.copy()
        read, flat, starts = self._read
        if len(read):
            last[read] = np.maximum.reduceat(place[flat], starts)
        change = np.zeros(count + 1, np.int64)
        change[:count] = self.bytes[order]
        np.subtract.at(change, last + 1, self.bytes)
        return There(np.cumsum(change[:count]), place, last)

    def moved(self, order: Numbers, there: There, run: int, to: int) -> Numbers | None:
        """The order in which an execution runs at another place; None if all between would go along.

        To a later place goes what needs it, to an earlier one what it needs.
        """
        start = int(there.place[run])
        later = to > start
        near: Sequence[Sequence[int] | set[int]] = self.needed_by if later else self.needs
        low, high = (start, to) if later else (to, start)
        along, found = {run}, [run]
        while found:
            for other in near[found.pop()]:
                if other not in along and low <= there.place[other] <= high:
                    along.add(other)
                    found.append(other)
        if len(along) == high - low + 1:
            return None
        goes = np.zeros(high - low + 1, np.bool_)
        goes[there.place[list(along)] - low] = True
        between = order[low : high + 1]
        parts = (between[~goes], between[goes]) if later else (between[goes], between[~goes])
        changed = order.copy()
        changed[low : high + 1] = np.concatenate(parts)
        return changed

    def made_again(self, order: Numbers, there: There, run: int, place: int) -> tuple[Runs, Numbers]:
        """What reads an execution behind a place reads a new one, the last, right before the first of them.

        That the one before may have no readers left is a matter of :meth:`without_unread`.
        """
        behind = [reader for reader in self.readers[run] if there.place[reader] > place]
        at = min(int(there.place[reader]) for reader in behind)
        op, new = self.ops[run], len(self.ops)
        reads = tuple(self.made_of(there, run, at))
        makers = [*self.makers, reads]
        for reader in behind:
            makers[reader] = tuple(new if maker == run else maker for maker in makers[reader])
        earlier = [*(new if before == run else before for before in self.earlier), run]
        return Runs(self.dag, (*self.ops, op), tuple(makers), tuple(earlier)), np.insert(order, at, new)

    def made_of(self, there: There, run: int, place: int) -> list[int]:
        """What an execution's op would read at a place: of each op, the last execution before."""

        def latest(op: int) -> int:
            before = (each for each in self._by_op[op] if there.place[each] < place)
            return max(before, key=lambda each: int(there.place[each]))

        return [latest(op) for op in self.dag.reads[self.ops[run]]]

    @cached_property
    def _by_op(self) -> list[list[int]]:
        return _turned([(op,) for op in self.ops], len(self.dag.reads))

    def left_out(self, order: Numbers, run: int) -> tuple[Runs, Numbers]:
        """What reads an execution of an op that has run before reads the one before instead."""
        before = self.earlier[run]
        assert before is not None
        makers = list(self.makers)
        for reader in self.readers[run]:
            makers[reader] = tuple(before if maker == run else maker for maker in makers[reader])
        runs = Runs(self.dag, self.ops, tuple(makers), self.earlier)
        return runs.without_unread(order)

    def without_unread(self, order: Numbers) -> tuple[Runs, Numbers]:
        """Without executions that nobody reads, of ops that are read."""
        left = [len(readers) for readers in self.readers]
        gone = {run for run, count in enumerate(left) if not count and self.ops[run] in self._read_ops}
        asked = sorted(gone)
        while asked:
            for maker in self.makers[asked.pop()]:
                left[maker] -= 1
                if not left[maker] and maker not in gone:
                    gone.add(maker)
                    asked.append(maker)
        if not gone:
            return self, order
        kept = [run for run in range(len(self.ops)) if run not in gone]
        number = {run: new for new, run in enumerate(kept)}
        earlier: list[int | None] = []
        for run in kept:
            before = self.earlier[run]
            while before in gone:
                before = self.earlier[before]
            earlier.append(None if before is None else number[before])
        return Runs(
            self.dag,
            tuple(self.ops[run] for run in kept),
            tuple(tuple(number[maker] for maker in self.makers[run]) for run in kept),
            tuple(earlier),
        ), np.array([number[run] for run in order.tolist() if run in number], np.int64)

    @cached_property
    def _read_ops(self) -> frozenset[int]:
        return frozenset(op for reads in self.dag.reads for op in reads)


def _turned(lists: Iterable[Iterable[int]], count: int) -> list[list[int]]:
    """Of each number below ``count``, the places of the lists that it is in."""
    found: list[list[int]] = [[] for _ in range(count)]
    for place, numbers in enumerate(lists):
        for number in numbers:
            found[number].append(place)
    return found

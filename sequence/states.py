"""The states (s, t, dying skip values) of the table: a row for each that can come up, equal ones shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.sequence.chain_problem import ChainProblem
from hybridremat.sequence.skip_liveness import NO_SKIPS, SkipLiveness, SkipSet
from hybridremat.sequence.transitions import CheckpointTransitions, Transitions

MOST_ROWS: Final = 6000
"""Rows of a chain with skip values (2–4 s); beyond, these are charged as if they were held to the end."""

MOST_CHECKPOINTS: Final = 2_000_000
"""Checkpoints looked at to find those rows (some 2 s)."""

Numbers = NDArray[np.int64]

SubChain = tuple[int, int, SkipSet]
"""Blocks s…t and the skip values that die there."""

States = dict[tuple[int, int], set[SkipSet]]


@dataclass(frozen=True)
class TableRows:
    """The rows of a table: equal sub-chains share one.

    Attributes
    ----------
    first
        Of each row a sub-chain that has it; what a row is made of comes before it.
    by_span
        Row by s and t, in a chain without skip values.
    by_state
        Row by sub-chain, in one with skip values.
    skips
        When these die.
    """

    first: tuple[SubChain, ...]
    skips: SkipLiveness
    by_span: Numbers | None = None
    by_state: Mapping[SubChain, int] = field(default_factory=dict)
    _around: dict[SubChain, tuple[Numbers, Numbers]] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.first)

    def number(self, s: int, t: int, dying: SkipSet = NO_SKIPS) -> int:
        """The row of one sub-chain."""
        return self.by_state[s, t, dying] if self.by_span is None else int(self.by_span[s, t])

    def numbers(self, s: int | Numbers, t: int | Numbers, dying: Sequence[SkipSet]) -> Numbers:
        """The rows of several sub-chains: one for each set of skip values."""
        if self.by_span is not None:
            return np.broadcast_to(self.by_span[s, t], (len(dying),))
        first, last = (repeat(ends) if isinstance(ends, int) else ends.tolist() for ends in (s, t))
        return np.array([*map(self.by_state.__getitem__, zip(first, last, dying, strict=False))], np.int64)

    def around(
        self, s: int, t: int, dying: SkipSet, splits: CheckpointTransitions
    ) -> tuple[Numbers, Numbers]:
        """The rows of (j,t) and of (s,j−1) for every checkpoint j of a sub-chain."""
        found = self._around.get((s, t, dying))
        if found is None:
            found = self.numbers(splits.at, t, splits.later), self.numbers(s, splits.at - 1, splits.earlier)
            if self.by_span is None:  # those of chains without skip values are views of one array
                self._around[s, t, dying] = found
        return found


def table_rows(problem: ChainProblem) -> tuple[ChainProblem, TableRows]:
    """The chain and its rows; without skip values if these would make too many."""
    if problem.skip_values:
        skips = SkipLiveness(problem)
        states = _states(Transitions(problem, skips, unit=1), len(problem))
        rows = _rows_of_states(problem, states, skips) if states else None
        if rows and len(rows) <= MOST_ROWS:
            return problem, rows
        problem = replace(problem, skip_values=())
    return problem, _rows_of_spans(problem)


def _rows_of_spans(problem: ChainProblem) -> TableRows:
    skips = SkipLiveness(problem)
    keys = _row_keys(problem, skips)
    length = len(keys)
    numbers = np.zeros_like(keys)
    first: list[SubChain] = []
    for distance in range(length):
        s = np.arange(length - distance)
        _, places, number = np.unique(keys[s, s + distance], return_index=True, return_inverse=True)
        numbers[s, s + distance] = len(first) + number
        first += [(place, place + distance, NO_SKIPS) for place in places.tolist()]
    return TableRows(tuple(first), skips, numbers)


def _rows_of_states(problem: ChainProblem, states: States, skips: SkipLiveness) -> TableRows:
    keys = _row_keys(problem, skips).tolist()
    interned: dict[object, int] = {}
    first: list[SubChain] = []
    numbers: dict[SubChain, int] = {}
    for s in reversed(range(len(problem))):
        for t in range(s, len(problem)):
            for dying in sorted(states[s, t]):
                key = (t - s, keys[s][t], skips.signature(s, t, dying))
                numbers[s, t, dying] = number = interned.setdefault(key, len(first))
                if number == len(first):
                    first.append((s, t, dying))
    return TableRows(tuple(first), skips, by_state=numbers)


def _states(transitions: Transitions, length: int) -> States | None:
    """The sets of skip values that can die in each (s,t), from the whole chain inwards; None if too many."""
    states: States = {(s, t): set() for s in range(length) for t in range(s, length)}
    states[0, length - 1].add(NO_SKIPS)
    looked_at = 0
    for s in range(length):
        for t in reversed(range(s + 1, length)):
            looked_at += (t - s) * len(states[s, t])
            if looked_at > MOST_CHECKPOINTS:
                return None
            for dying in states[s, t]:
                states[s + 1, t] |= transitions.rests(s, t, dying)
                around = transitions.skips.dying_around(s, t, dying)
                for j, later, earlier in zip(range(s + 1, t + 1), *around, strict=True):
                    states[j, t].add(later)
                    states[s, j - 1].add(earlier)
    return states


def _row_keys(problem: ChainProblem, skips: SkipLiveness) -> Numbers:
    """A number for each (s,t) such that equal numbers have equal rows, if t − s is equal, too."""
    length = len(problem)
    classes: dict[object, int] = {}
    block_class = np.array(
        [
            classes.setdefault((block, problem.gradient_bytes[i + 1], skips.pattern(i)), len(classes))
            for i, block in enumerate(problem.blocks)
        ]
    )
    boundary, plain = _numbered(np.array(problem.boundary_bytes)), _numbered(np.array(problem.plain_peak))
    keys = np.zeros((length, length), np.int64)
    # of every s, what is told apart by: boundary bytes and plain peaks from s to t, the same chain without s
    carried = peaks = rest = np.zeros(length, np.int64)
    for distance in range(length):
        s = np.arange(length - distance)
        t = s + distance
        if distance:
            carried = _numbered(carried[:-1], boundary[s, t])
            peaks = _numbered(peaks[:-1], plain[s, t - 1])
            rest = rest[1:]
        # the first forward (t = L−1) has terms of its own
        rest = keys[s, t] = _numbered(block_class[s], rest, carried, peaks, t == length - 1)
    return keys


def _numbered(*columns: Numbers) -> Numbers:
    """A number from 0 on for each entry, equal where the entries of all columns are."""
    number = np.zeros(columns[0].shape, np.int64)
    for column in columns:
        pair = number * (int(column.max(initial=0)) + 1) + column if len(columns) > 1 else column
        number = np.unique(pair, return_inverse=True)[1].reshape(column.shape)
    return number

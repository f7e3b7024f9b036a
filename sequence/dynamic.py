"""The dynamic program over the chain: Opt[s,t,m] of design.md section 5, as tables of slots.

Opt[s,t,m] is the least time to run blocks s…t forward and backward with m bytes, x_s held outside of m:

- run s with option o:  uf_s + t_o + Opt[s+1,t,m−S_o]     if m ≥ max(g_{t+1} + pf_o, pb_o)
- s = t, re-run:        a solo option of block s
- checkpoint at j:      Σ_{s≤k<j} uf_k + Opt[j,t,m−a_j] + Opt[s,j−1,m]
                                                if m ≥ g_{t+1} + max_{s≤k<j} pn_k

It is the recursion of Rotor (Herrmann et al., 2019) and of Rockmate (Zhao et al., ICML 2023), extended by
solo options, boundaries of several values and parameter gradients. It is optimal up to the rounding to
slots among schedules of this recursive shape; other shapes (keeping part of a boundary, for one) are not
looked at.

Two things beside the formula. Rows count bytes *above* what the blocks after t hold while (s,t) runs
(their parameter gradients, the tangents), so that equal sub-chains have equal rows, wherever they stand;
equal rows are computed once: about 3L of the L²/2 in a chain of equal layers. And rows hold times only:
a decision is found again from the rows when it is asked for.

Long chains: a row costs some microseconds for every option and every possible checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.sequence.decisions import Backward, Decision, Forward, ForwardOption, Solo
from hybridremat.sequence.problem import BlockFigures, ChainProblem

SLOTS: Final = 1500
"""Slots per plain peak: 0.07 % each."""

Row = NDArray[np.float64]
"""Times in nanoseconds by slot (whole numbers, exact below 2**53); infinite where nothing fits."""


class InfeasibleSlotError(ValueError):
    """Nothing fits in this number of slots."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """An option in slots: needs ``least`` slots and leaves all but ``saved`` to the blocks after it."""

    number: int
    saved: int
    least: int
    time: int


@dataclass(frozen=True)
class ChainTable:
    """Opt for all (s,t): ``rows[row_of[s][t]][m]``, with m in slots of ``unit`` bytes."""

    problem: ChainProblem
    unit: int
    rows: tuple[Row, ...]
    row_of: tuple[tuple[int, ...], ...]

    @property
    def top(self) -> Row:
        """Opt[0,L−1,·]: least time of the whole step by slots."""
        return self.row(0, len(self.problem) - 1)

    def row(self, s: int, t: int) -> Row:
        """Opt[s,t,·]."""
        return self.rows[self.row_of[s][t]]

    def breakpoints(self) -> tuple[int, ...]:
        """Slots at which the whole step becomes feasible or faster, ascending."""
        top = self.top
        before = np.concatenate(([np.inf], top[:-1]))
        return tuple(int(m) for m in np.flatnonzero(top < before))

    def peak_bytes(self, slot: int) -> int:
        """The limit in bytes that a breakpoint keeps to."""
        return slot * self.unit + self.problem.always_bytes


def chain_table(problem: ChainProblem, *, memory: int, slots: int = SLOTS) -> ChainTable:
    """Opt for every sub-chain and every limit up to ``memory``.

    Parameters
    ----------
    problem
        The chain as integers.
    memory
        Bytes of the largest limit of interest: the plain peak, as a rule.
    slots
        How finely ``memory`` is cut. Sizes are rounded up to slots and limits down, so the table
        never promises less memory than a schedule needs.
    """
    unit = max(1, -(-memory // slots))
    length = len(problem)
    # sizes are rounded up once per block, so the plain step needs up to one slot more for each
    count = -(-memory // unit) + length + 1
    keys = _row_keys(problem)
    rows: list[Row] = []
    number: dict[int, int] = {}
    row_of = [[-1] * length for _ in range(length)]
    table = ChainTable(problem, unit, (), ())
    for s in reversed(range(length)):
        for t in range(s, length):
            key = keys[s][t]
            if key not in number:
                number[key] = len(rows)
                rows.append(_row(table, rows, row_of, s, t, count))
            row_of[s][t] = number[key]
    return ChainTable(problem, unit, tuple(rows), tuple(map(tuple, row_of)))


def _row_keys(problem: ChainProblem) -> list[list[int]]:
    """A number for each (s,t) such that equal numbers have equal rows."""
    length = len(problem)
    interned: dict[object, int] = {}

    def intern(key: object) -> int:
        return interned.setdefault(key, len(interned))

    classes: dict[tuple[BlockFigures, int], int] = {}
    block_class = [
        classes.setdefault((block, problem.gradient_bytes[i + 1]), len(classes))
        for i, block in enumerate(problem.blocks)
    ]
    keys = [[-1] * length for _ in range(length)]
    for s in reversed(range(length)):
        boundary, plain = problem.boundary_bytes[s], problem.plain_peak[s]
        for t in range(s, length):
            rest = keys[s + 1][t] if t > s else -1
            # the first forward (t = L−1) has terms of its own, by position
            place = s if t == length - 1 else -1
            keys[s][t] = intern((block_class[s], rest, place, boundary[s + 1 : t + 1], plain[s:t]))
    return keys


def held_bytes(problem: ChainProblem, t: int) -> int:
    """Bytes that exist while a sub-chain ending at t runs: gradients of blocks after t, tangents."""
    first_forward = t == len(problem) - 1
    return problem.later_gradients[t] + (0 if first_forward else problem.tangent_bytes)


def _forward_base(problem: ChainProblem, t: int, block: int) -> int:
    """Bytes beside a forward of ``block`` in a sub-chain that ends at t: g_{t+1}, and released outputs."""
    released = problem.released_bytes[block] if t == len(problem) - 1 and problem.released_bytes else 0
    return problem.gradient_bytes[t + 1] + released


def _backward_base(problem: ChainProblem, s: int, t: int) -> int:
    """Bytes beside the backward of s above those held for t: gradients of s+1…t, tangents if new."""
    return problem.later_gradients[s] + problem.tangent_bytes - held_bytes(problem, t)


def _choices(problem: ChainProblem, unit: int, s: int, t: int) -> list[_Choice]:
    """The ordinary options of block s within (s,t) in slots, those dominated after rounding left out."""
    forward, backward = _forward_base(problem, t, s), _backward_base(problem, s, t)
    found = [
        _Choice(
            number,
            _up(o.saved, unit),
            _up(max(forward + o.forward_peak, backward + o.backward_peak, o.saved), unit),
            o.time + problem.blocks[s].forward_time,
        )
        for number, o in enumerate(problem.blocks[s].options)
    ]
    kept: list[_Choice] = []
    for choice in sorted(found, key=lambda c: (c.time, c.least, c.saved, c.number)):
        if not any(k.least <= choice.least and k.saved <= choice.saved for k in kept):
            kept.append(choice)
    return kept


def _solos(problem: ChainProblem, unit: int, s: int) -> list[_Choice]:
    """The solo options of block s when it is re-run; the last block's first run is not a re-run."""
    if s == len(problem) - 1:
        return []
    base = _backward_base(problem, s, s)
    return [
        _Choice(number, 0, _up(base + o.backward_peak, unit), o.time)
        for number, o in enumerate(problem.blocks[s].solo)
    ]


@dataclass(frozen=True, slots=True)
class _Split:
    """A checkpoint at j in slots: needs ``least``; (j,t) gets ``carried`` less, (s,j−1) ``grown`` less."""

    at: int
    least: int
    carried: int
    grown: int
    time: int


def _splits(problem: ChainProblem, unit: int, s: int, t: int) -> list[_Split]:
    """Every checkpoint of (s,t)."""
    peak = time = 0
    held = held_bytes(problem, t)
    found = []
    for j in range(s + 1, t + 1):
        peak = max(peak, _forward_base(problem, t, j - 1) + problem.plain_peak[s][j - 1])
        time += problem.blocks[j - 1].forward_time
        carried = _up(problem.boundary_bytes[s][j], unit)
        grown = _up(held_bytes(problem, j - 1) - held, unit)
        found.append(_Split(j, max(_up(peak, unit), carried, grown), carried, grown, time))
    return found


def _row(table: ChainTable, rows: list[Row], row_of: list[list[int]], s: int, t: int, count: int) -> Row:
    """Opt[s,t,·] from the rows of shorter sub-chains."""
    problem, unit = table.problem, table.unit
    best = np.full(count, np.inf)
    if s == t:
        for choice in _choices(problem, unit, s, t) + _solos(problem, unit, s):
            np.minimum(best[choice.least :], choice.time, out=best[choice.least :])
        return best
    rest = rows[row_of[s + 1][t]]
    for choice in (c for c in _choices(problem, unit, s, t) if c.least < count):
        time = rest[choice.least - choice.saved : count - choice.saved] + choice.time
        np.minimum(best[choice.least :], time, out=best[choice.least :])
    for split in (c for c in _splits(problem, unit, s, t) if c.least < count):
        later = rows[row_of[split.at][t]][split.least - split.carried : count - split.carried]
        earlier = rows[row_of[s][split.at - 1]][split.least - split.grown : count - split.grown]
        np.minimum(best[split.least :], later + earlier + split.time, out=best[split.least :])
    return best


def _up(size: int, unit: int) -> int:
    return -(-size // unit)


def rebuild(table: ChainTable, slot: int) -> tuple[Decision, ...]:
    """The decisions behind ``table.top[slot]``; among equals, options before checkpoints.

    Raises
    ------
    InfeasibleSlotError
        If nothing fits in ``slot`` slots.
    """
    if not np.isfinite(table.top[slot]):
        raise InfeasibleSlotError(f"no schedule of this chain fits in {table.peak_bytes(slot)} bytes")
    decisions: list[Decision] = []
    # a list of what is still to do, not recursion: chains may be longer than Python's stack
    pending: list[Decision | tuple[int, int, int]] = [(0, len(table.problem) - 1, slot)]
    while pending:
        item = pending.pop()
        if isinstance(item, tuple):
            pending.extend(reversed(_expand(table, *item)))
        else:
            decisions.append(item)
    return tuple(decisions)


def _expand(table: ChainTable, s: int, t: int, m: int) -> list[Decision | tuple[int, int, int]]:
    """The decision at Opt[s,t,m]: what to run, with sub-chains (s,t,m) left to expand."""
    problem, unit = table.problem, table.unit
    wanted = table.row(s, t)[m]
    for choice in (c for c in _choices(problem, unit, s, t) if c.least <= m):
        time = choice.time + (table.row(s + 1, t)[m - choice.saved] if t > s else 0)
        if time == wanted:
            rest = [(s + 1, t, m - choice.saved)] if t > s else []
            return [ForwardOption(s, choice.number), *rest, Backward(s, choice.number)]
    if s == t:
        fitting = [c for c in _solos(problem, unit, s) if c.least <= m and c.time == wanted]
        return [Solo(s, fitting[0].number)]
    for split in (c for c in _splits(problem, unit, s, t) if c.least <= m):
        later, earlier = m - split.carried, m - split.grown
        if table.row(split.at, t)[later] + table.row(s, split.at - 1)[earlier] + split.time == wanted:
            forwards = (Forward(k) for k in range(s, split.at))
            return [*forwards, (split.at, t, later), (s, split.at - 1, earlier)]
    raise AssertionError(f"Opt[{s},{t},{m}] has no decision behind it")

"""The dynamic program over the chain: Opt[s,t,m] of docs/method.md as a table ``opt`` over slots.

Opt[s,t,m] is the least time to run blocks s…t forward and backward with m bytes, x_s held outside of m:

- run s with option o:  uf_s + t_o + Opt[s+1,t,m−S_o]     if m ≥ max(g_{t+1} + pf_o, pb_o)
- s = t, re-run:        a solo option of block s
- checkpoint at j:      Σ_{s≤k<j} uf_k + Opt[j,t,m−a_j] + Opt[s,j−1,m]
                                                if m ≥ g_{t+1} + max_{s≤k<j} pn_k

It is the recursion of Rotor (Herrmann et al., 2019) and of Rockmate (Zhao et al., ICML 2023), extended by
solo options, boundaries of several values and parameter gradients. It is optimal up to the rounding to
slots among schedules of this recursive shape; other shapes (keeping part of a boundary, for one) are not
looked at.

S_o, a_j and pb_o are less where skip values die (:mod:`hybridremat.sequence.skip_liveness`): without that the
table's peaks were 3–4 % too high in chains whose boundaries hold several values, and a long skip was held in
vain.

A row costs some microseconds for each option and each checkpoint: 0.7 s for 40 blocks that all differ, with
150 options each; 0.2 s for 100 equal layers; 3.5 s for 100 blocks that all differ, which is where it stops
being quick (the rows grow as L², the work as L³).

Two things beside the formula. Rows count bytes *above* what the blocks after t hold while (s,t) runs
(their parameter gradients, the tangents), so that equal sub-chains have equal rows, wherever they stand;
equal rows are computed once: about 3L of the L²/2 in a chain of equal layers. And rows hold times only:
:mod:`hybridremat.sequence.backtrack` finds a decision again from the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.sequence.chain_problem import ChainProblem
from hybridremat.sequence.skip_liveness import NO_SKIPS, SkipSet
from hybridremat.sequence.states import SubChain, table_rows
from hybridremat.sequence.transitions import Transitions

MOST_SLOTS: Final = 6000
"""Slots per plain peak. Every block's sizes are rounded up, so long chains need fine slots: on chains of
12–96 GPT-2 layers 6000 slots lose 0.01–0.09 % of the step's time to rounding, 1500 lose 0.09–0.3 %."""

MOST_ENTRIES: Final = 25_000_000
"""Entries of a table (200 MB): where there are too many rows for that, slots are made coarser."""

LEAST_SLOTS: Final = 1000
"""However many rows."""

Row = NDArray[np.float64]
"""Times in nanoseconds by slot (whole numbers, exact below 2**53); infinite where nothing fits."""


@dataclass(frozen=True)
class ChainTable:
    """Opt for all (s,t): ``opt[row_of[s,t,dying]][m]``, with m in slots of ``unit`` bytes.

    ``dying`` are the skip values that die in (s,t): none in most chains; in the others there is one row for
    each set of them that can come up (:mod:`hybridremat.sequence.skip_liveness`).
    """

    problem: ChainProblem
    unit: int
    opt: tuple[Row, ...]
    row_of: Mapping[SubChain, int]

    @property
    def top(self) -> Row:
        """Opt[0,L−1,·]: least time of the whole step by slots."""
        return self.row(0, len(self.problem) - 1)

    def row(self, s: int, t: int, dying: SkipSet = NO_SKIPS) -> Row:
        """Opt[s,t,·]."""
        return self.opt[self.row_of[s, t, dying]]

    def breakpoints(self) -> tuple[int, ...]:
        """Slots at which the whole step becomes feasible or faster, ascending."""
        top = self.top
        before = np.concatenate(([np.inf], top[:-1]))
        return tuple(int(m) for m in np.flatnonzero(top < before))

    def peak_bytes(self, slot: int) -> int:
        """The limit in bytes that a schedule of ``slot`` slots keeps to."""
        return slot * self.unit + self.problem.always_bytes


def chain_table(
    problem: ChainProblem,
    *,
    memory: int,
    slots: int | None = None,
    row_of: Mapping[SubChain, int] | None = None,
) -> ChainTable:
    """Opt for every sub-chain and every limit up to ``memory``.

    Parameters
    ----------
    problem
        The chain as integers, of at least one block.
    memory
        Bytes of the largest limit of interest: the plain peak, as a rule.
    slots
        How finely ``memory`` is cut; by default as finely as the number of rows allows. Sizes are
        rounded up to slots and limits down, so the table never promises less memory than a schedule needs.
    row_of
        Those of another table of the same problem, if there is one.
    """
    problem, number = table_rows(problem) if row_of is None else (problem, row_of)
    if slots is None:
        distinct = len(set(number.values()))
        slots = max(LEAST_SLOTS, min(MOST_SLOTS, MOST_ENTRIES // distinct))
    unit = max(1, -(-memory // slots))
    # every block's sizes are rounded up, so the plain step needs up to one slot more for each
    count = -(-memory // unit) + len(problem) + 1
    transitions = Transitions(problem, unit)
    rows: dict[int, Row] = {}
    for sub_chain, row in number.items():
        if row not in rows:
            rows[row] = _row(transitions, rows, number, sub_chain, count)
    return ChainTable(problem, unit, tuple(rows[row] for row in range(len(rows))), number)


def _row(
    transitions: Transitions,
    rows: Mapping[int, Row],
    row_of: Mapping[SubChain, int],
    sub_chain: SubChain,
    count: int,
) -> Row:
    """Opt[s,t,·] from the rows of shorter sub-chains."""
    s, t, dying = sub_chain
    best = np.full(count, np.inf)
    options = transitions.options(s, t, dying)
    if s == t:
        for found in (options, transitions.solos(s, dying)):
            for least, spent in zip(found.least.tolist(), found.time.tolist(), strict=True):
                np.minimum(best[least:], spent, out=best[least:])
        return best
    splits = transitions.checkpoints(s, t, dying)
    figures = (options.least, options.saved, options.time)
    for least, saved, spent, rest in zip(*(c.tolist() for c in figures), options.rest, strict=True):
        if least < count:
            later = _with_less(rows[row_of[s + 1, t, rest]], saved, least)
            np.minimum(best[least:], later + spent, out=best[least:])
    columns = (splits.at, splits.least, splits.carried, splits.grown, splits.time)
    for (j, least, carried, grown, spent), after, before in zip(
        zip(*(c.tolist() for c in columns), strict=True), splits.later, splits.earlier, strict=True
    ):
        if least < count:
            later = rows[row_of[j, t, after]][least - carried : count - carried]
            earlier = _with_less(rows[row_of[s, j - 1, before]], grown, least)
            np.minimum(best[least:], later + earlier + spent, out=best[least:])
    return best


def _with_less(row: Row, less: int, least: int) -> Row:
    """The times from ``least`` slots on of what has ``less`` slots (below zero: more, up to the last)."""
    if less >= 0:
        return row[least - less : len(row) - less]
    return np.concatenate((row[least - less :], np.full(min(-less, len(row) - least), row[-1])))

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

S_o, a_j and pb_o are less where skip values die (:mod:`hybridremat.sequence.skip_liveness`): a long skip
would be held in vain else.

Rows are filled by :mod:`hybridremat.sequence.least_times`. Tables with 60 options a block take about 3 s for
1000 equal blocks and 20 s for 300 that all differ (docs/benchmarks.md): rows grow as L², the work as L³.

Two things beside the formula. Rows count bytes *above* what the blocks after t hold while (s,t) runs
(their parameter gradients, the tangents), so that equal sub-chains have equal rows, wherever they stand;
equal rows are computed once: about 3L of the L²/2 in a chain of equal layers. And rows hold times only:
:mod:`hybridremat.sequence.backtrack` finds a decision again from the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.sequence.chain_problem import ChainProblem
from hybridremat.sequence.least_times import CheckpointWays, OptionWays, Row, TimeRows
from hybridremat.sequence.skip_liveness import NO_SKIPS, SkipSet
from hybridremat.sequence.states import SubChain, TableRows, table_rows
from hybridremat.sequence.transitions import Transitions

MOST_SLOTS: Final = 6000
"""Slots per plain peak. Every block's sizes are rounded up, so long chains need fine slots: on chains of
12–96 GPT-2 layers 6000 slots lose 0.01–0.09 % of the step's time to rounding, 1500 lose 0.09–0.3 %."""

MOST_ENTRIES: Final = 25_000_000
"""Entries of a table (200 MB): where there are too many rows for that, slots are made coarser."""

LEAST_SLOTS: Final = 1000
"""However many rows."""

EXACT_TICKS: Final = 1 << 22
"""A table's times count ticks: of so many nanoseconds each that a step in which every block uses its slowest
option takes at most as many ticks. Times are rounded to the nearest; sums up to four such steps are exact."""


@dataclass(frozen=True)
class ChainTable:
    """Opt for all (s,t): ``row(s,t,dying)[m]``, m in slots of ``unit`` bytes, times in ticks of ``tick`` ns.

    ``dying`` are the skip values that die in (s,t): none in most chains; in the others there is one row for
    each set of them that can come up (:mod:`hybridremat.sequence.skip_liveness`).
    """

    problem: ChainProblem
    unit: int
    tick: int
    opt: TimeRows
    rows: TableRows

    @cached_property
    def top(self) -> NDArray[np.float64]:
        """Opt[0,L−1,·]: least time of the whole step by slots, in nanoseconds."""
        return np.multiply(self.row(0, len(self.problem) - 1), self.tick, dtype=np.float64)

    def row(self, s: int, t: int, dying: SkipSet = NO_SKIPS) -> Row:
        """Opt[s,t,·] in ticks."""
        row: Row = self.opt.times[self.rows.number(s, t, dying)]
        return row

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
    rows: TableRows | None = None,
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
    rows
        Those of another table of the same problem, if there is one.
    """
    problem, rows = table_rows(problem) if rows is None else (problem, rows)
    unit = slot_bytes(memory, slots_for(rows) if slots is None else slots)
    # every block's sizes are rounded up, so the plain step needs up to one slot more for each
    opt = TimeRows(len(rows), -(-memory // unit) + len(problem) + 1)
    transitions = Transitions(problem, rows.skips, unit, tick_of(problem))
    for number, (s, t, dying) in enumerate(rows.first):
        forward = transitions.forward_time(s, t)
        if s == t:
            opt.fill(number, _one_block(transitions, s, dying, opt.slots), forward)
        else:
            opt.fill_least(number, *_ways(transitions, rows, (s, t, dying)), forward)
    return ChainTable(problem, unit, transitions.tick, opt, rows)


def slots_for(rows: TableRows) -> int:
    """How finely memory is cut in a table of these rows."""
    return max(LEAST_SLOTS, min(MOST_SLOTS, MOST_ENTRIES // len(rows)))


def slot_bytes(memory: int, slots: int) -> int:
    """Bytes of a slot where ``memory`` bytes are cut into so many."""
    return max(1, -(-memory // slots))


def tick_of(problem: ChainProblem) -> int:
    """Nanoseconds that times are rounded to (:data:`EXACT_TICKS`)."""
    slowest = 0
    for block in problem.blocks:
        times = [option.time for option in block.options] + [solo.time for solo in block.solo]
        slowest += block.forward_time + max(times, default=0)
    return max(1, -(-slowest // EXACT_TICKS))


def _one_block(transitions: Transitions, s: int, dying: SkipSet, slots: int) -> Row:
    """Opt[s,s,·] from the options of block s."""
    best = np.full(slots, np.inf, np.float32)
    for found in (transitions.options(s, s, dying), transitions.solos(s, dying)):
        fits = found.least < slots
        np.minimum.at(best, found.least[fits], found.time[fits])
    return np.minimum.accumulate(best)


def _ways(
    transitions: Transitions, rows: TableRows, sub_chain: SubChain
) -> tuple[OptionWays, CheckpointWays]:
    """What Opt[s,t,·] is the least of, from the rows of shorter sub-chains."""
    s, t, dying = sub_chain
    options, splits = transitions.options(s, t, dying), transitions.checkpoints(s, t, dying)
    later, earlier = rows.around(s, t, dying, splits)
    return (
        OptionWays(rows.numbers(s + 1, t, options.rest), options.saved, options.least, options.time),
        CheckpointWays(later, splits.carried, earlier, splits.grown, splits.least),
    )

"""Backtracking: the decisions behind an entry Opt[s,t,m], found again from the table's rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridremat.sequence.decisions import Backward, Decision, Forward, ForwardOption, Solo
from hybridremat.sequence.dynamic_program import ChainTable
from hybridremat.sequence.least_times import Integers
from hybridremat.sequence.skip_liveness import NO_SKIPS, SkipSet
from hybridremat.sequence.transitions import CheckpointTransitions, OptionTransitions, Transitions

State = tuple[int, int, SkipSet, int]
"""(s, t, dying, m): blocks s…t are to be run forward and backward with m slots."""


class InfeasibleSlotError(ValueError):
    """Nothing fits in this number of slots."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """What is done at an entry of a row: an option of the first block, or a checkpoint some blocks after it.

    ``rest`` slots are left to the blocks after it or, of a checkpoint, from there on; ``before`` to those
    before the checkpoint. Only one of ``option``, ``solo`` and ``distance`` is not None.
    """

    option: int | None = None
    solo: int | None = None
    distance: int | None = None
    rest: int = 0
    before: int = 0


class Backtracker:
    """Finds the decisions behind entries of one table, and remembers what is chosen at an entry of a row."""

    def __init__(self, table: ChainTable) -> None:
        self._table = table
        self._transitions = Transitions(table.problem, table.rows.skips, table.unit, table.tick)
        self._most = table.opt.slots - 1
        self._options: dict[int, tuple[OptionTransitions, Integers]] = {}
        self._checkpoints: dict[int, tuple[CheckpointTransitions, Integers, Integers]] = {}
        self._known: dict[tuple[int, int], _Choice] = {}

    def __call__(self, slot: int) -> tuple[Decision, ...]:
        """The decisions behind ``table.top[slot]``; among equals, options before checkpoints.

        Raises
        ------
        InfeasibleSlotError
            If nothing fits in ``slot`` slots.
        """
        table = self._table
        if not np.isfinite(table.top[slot]):
            raise InfeasibleSlotError(f"no schedule of this chain fits in {table.peak_bytes(slot)} bytes")
        decisions: list[Decision] = []
        # a list of what is still to do, not recursion: chains may be longer than Python's stack
        pending: list[Decision | State] = [(0, len(table.problem) - 1, NO_SKIPS, slot)]
        while pending:
            item = pending.pop()
            if isinstance(item, tuple):
                pending.extend(reversed(self._expand(*item)))
            else:
                decisions.append(item)
        return tuple(decisions)

    def _expand(self, s: int, t: int, dying: SkipSet, m: int) -> list[Decision | State]:
        """What is done at Opt[s,t,m], with the sub-chains that are left to expand."""
        entry = self._table.rows.number(s, t, dying), m
        if entry not in self._known:
            self._known[entry] = self._choose(s, t, dying, m)
        found, transitions = self._known[entry], self._transitions
        if found.solo is not None:
            return [Solo(s, found.solo)]
        if found.option is not None:
            option = ForwardOption(s, found.option), Backward(s, found.option)
            if s == t:
                return list(option)
            rest = transitions.rest_of(s, t, dying, found.option)
            return [option[0], (s + 1, t, rest, found.rest), option[1]]
        assert found.distance is not None
        j = s + found.distance
        later, earlier = transitions.dying_around(s, t, dying, j)
        runs = (Forward(k) for k in range(s, j))
        return [*runs, (j, t, later, found.rest), (s, j - 1, earlier, found.before)]

    def _choose(self, s: int, t: int, dying: SkipSet, m: int) -> _Choice:
        """What gives the time of Opt[s,t,m]; equal rows choose alike."""
        choice = self._one_block(s, dying, m) if s == t else self._option(s, t, dying, m)
        return choice or self._checkpoint(s, t, dying, m)

    def _one_block(self, s: int, dying: SkipSet, m: int) -> _Choice:
        wanted = self._table.row(s, s, dying)[m]
        options, solos = self._transitions.options(s, s, dying), self._transitions.solos(s, dying)
        hits = np.flatnonzero((options.least <= m) & (options.time == wanted))
        if len(hits):
            return _Choice(option=_first(options, hits))
        return _Choice(solo=_first(solos, np.flatnonzero((solos.least <= m) & (solos.time == wanted))))

    def _option(self, s: int, t: int, dying: SkipSet, m: int) -> _Choice | None:
        table = self._table
        number = table.rows.number(s, t, dying)
        if number not in self._options:
            options = self._transitions.options(s, t, dying)
            self._options[number] = options, table.rows.numbers(s + 1, t, options.rest)
        options, rests = self._options[number]
        fits = np.flatnonzero(options.least <= m)
        left = np.minimum(m - options.saved[fits], self._most)
        times = table.opt.times[rests[fits], left] + options.time[fits]
        hits = fits[times == table.opt.times[number, m]]
        if not len(hits):
            return None
        option = _first(options, hits)
        return _Choice(option=option, rest=min(m - int(options.saved[option]), self._most))

    def _checkpoint(self, s: int, t: int, dying: SkipSet, m: int) -> _Choice:
        table = self._table
        number = table.rows.number(s, t, dying)
        if number not in self._checkpoints:
            splits = self._transitions.checkpoints(s, t, dying)
            self._checkpoints[number] = splits, *table.rows.around(s, t, dying, splits)
        splits, later, earlier = self._checkpoints[number]
        fits = np.flatnonzero(splits.least <= m)
        rest = m - splits.carried[fits]
        before = np.minimum(m - splits.grown[fits], self._most)
        times = table.opt.times[later[fits], rest] + table.opt.after_forward[earlier[fits], before]
        hits = np.flatnonzero(times == table.opt.times[number, m])
        if not len(hits):
            raise AssertionError(f"Opt[{s},{t},{m}] has no decision behind it")
        hit = int(hits[0])
        return _Choice(distance=int(fits[hit]) + 1, rest=int(rest[hit]), before=int(before[hit]))


def _first(options: OptionTransitions, hits: Integers) -> int:
    """Of equal options the fastest, then that which needs least, then that which saves least."""
    figures = (options.time[hits], options.least[hits], options.saved[hits])
    return int(hits[np.lexsort(figures[::-1])[0]])

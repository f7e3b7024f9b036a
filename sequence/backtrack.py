"""Backtracking: the decisions behind an entry Opt[s,t,m], found again from the table's rows."""

from __future__ import annotations

import numpy as np

from hybridremat.sequence.decisions import Backward, Decision, Forward, ForwardOption, Solo
from hybridremat.sequence.dynamic_program import ChainTable
from hybridremat.sequence.skip_liveness import NO_SKIPS, SkipSet
from hybridremat.sequence.states import SubChain
from hybridremat.sequence.transitions import CheckpointTransitions, Integers, OptionTransitions, Transitions

State = tuple[int, int, SkipSet, int]
"""(s, t, dying, m): blocks s…t are to be run forward and backward with m slots."""


class InfeasibleSlotError(ValueError):
    """Nothing fits in this number of slots."""


class Backtracker:
    """Finds the decisions behind entries of one table, and remembers them."""

    def __init__(self, table: ChainTable) -> None:
        self._table = table
        self._transitions = Transitions(table.problem, table.unit)
        self._options: dict[SubChain, tuple[OptionTransitions, tuple[tuple[SkipSet, Integers], ...]]] = {}
        self._checkpoints: dict[SubChain, CheckpointTransitions] = {}
        self._known: dict[State, list[Decision | State]] = {}

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
                if item not in self._known:
                    self._known[item] = self._expand(*item)
                pending.extend(reversed(self._known[item]))
            else:
                decisions.append(item)
        return tuple(decisions)

    def _expand(self, s: int, t: int, dying: SkipSet, m: int) -> list[Decision | State]:
        """What is done at Opt[s,t,m], with the sub-chains that are left to expand."""
        if s == t:
            return self._one_block(s, dying, m)
        wanted = self._table.row(s, t, dying)[m]
        options, places_by_rest = self._option_transitions(s, t, dying)
        most = len(self._table.top) - 1
        for rest, places in places_by_rest:
            fits = places[options.least[places] <= m]
            left = np.minimum(m - options.saved[fits], most)
            hits = np.flatnonzero(self._table.row(s + 1, t, rest)[left] + options.time[fits] == wanted)
            if len(hits):
                number = int(options.number[fits[hits[0]]])
                return [ForwardOption(s, number), (s + 1, t, rest, int(left[hits[0]])), Backward(s, number)]
        return self._checkpoint(s, t, dying, m)

    def _option_transitions(
        self, s: int, t: int, dying: SkipSet
    ) -> tuple[OptionTransitions, tuple[tuple[SkipSet, Integers], ...]]:
        """The options at (s,t), and for each set of values that die after s, where its options stand."""
        if (s, t, dying) not in self._options:
            options = self._transitions.options(s, t, dying)
            places: dict[SkipSet, list[int]] = {}
            for place, rest in enumerate(options.rest):
                places.setdefault(rest, []).append(place)
            by_rest = tuple((rest, np.array(found, np.int64)) for rest, found in places.items())
            self._options[s, t, dying] = options, by_rest
        return self._options[s, t, dying]

    def _one_block(self, s: int, dying: SkipSet, m: int) -> list[Decision | State]:
        wanted = self._table.row(s, s, dying)[m]
        options, solos = self._transitions.options(s, s, dying), self._transitions.solos(s, dying)
        hits = options.number[(options.least <= m) & (options.time == wanted)].tolist()
        if hits:
            return [ForwardOption(s, hits[0]), Backward(s, hits[0])]
        return [Solo(s, solos.number[(solos.least <= m) & (solos.time == wanted)].tolist()[0])]

    def _checkpoint(self, s: int, t: int, dying: SkipSet, m: int) -> list[Decision | State]:
        if (s, t, dying) not in self._checkpoints:
            self._checkpoints[s, t, dying] = self._transitions.checkpoints(s, t, dying)
        table, splits = self._table, self._checkpoints[s, t, dying]
        wanted, most = table.row(s, t, dying)[m], len(table.top) - 1
        for i in np.flatnonzero(splits.least <= m).tolist():
            j, after, before = int(splits.at[i]), splits.later[i], splits.earlier[i]
            later, earlier = m - int(splits.carried[i]), min(most, m - int(splits.grown[i]))
            time = table.row(j, t, after)[later] + table.row(s, j - 1, before)[earlier] + splits.time[i]
            if time == wanted:
                runs = (Forward(k) for k in range(s, j))
                return [*runs, (j, t, after, later), (s, j - 1, before, earlier)]
        raise AssertionError(f"Opt[{s},{t},{m}] has no decision behind it")

"""The decisions behind an entry of the table, found again from its rows."""

from __future__ import annotations

import numpy as np

from hybridremat.sequence.decisions import Backward, Decision, Forward, ForwardOption, Solo
from hybridremat.sequence.dynamic_program import ChainTable
from hybridremat.sequence.skip_liveness import NO_SKIPS, SkipSet
from hybridremat.sequence.states import SubChain
from hybridremat.sequence.transitions import CheckpointTransitions, Integers, OptionTransitions, Transitions

State = tuple[int, int, SkipSet, int]
"""(s, t, ending, m): blocks s…t are to be run forward and backward with m slots."""


class InfeasibleSlotError(ValueError):
    """Nothing fits in this number of slots."""


class Backtracker:
    """Rebuilds decisions from one table; what it has found once it remembers."""

    def __init__(self, table: ChainTable) -> None:
        self._table = table
        self._moves = Transitions(table.problem, table.unit)
        self._options: dict[SubChain, tuple[OptionTransitions, tuple[tuple[SkipSet, Integers], ...]]] = {}
        self._splits: dict[SubChain, CheckpointTransitions] = {}
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

    def _expand(self, s: int, t: int, ending: SkipSet, m: int) -> list[Decision | State]:
        """What is done at Opt[s,t,m], with the sub-chains that are left to expand."""
        if s == t:
            return self._one_block(s, ending, m)
        wanted = self._table.row(s, t, ending)[m]
        options, places_by_rest = self._choices(s, t, ending)
        most = len(self._table.top) - 1
        for rest, places in places_by_rest:
            fits = places[options.least[places] <= m]
            left = np.minimum(m - options.saved[fits], most)
            hits = np.flatnonzero(self._table.row(s + 1, t, rest)[left] + options.time[fits] == wanted)
            if len(hits):
                number = int(options.number[fits[hits[0]]])
                return [ForwardOption(s, number), (s + 1, t, rest, int(left[hits[0]])), Backward(s, number)]
        return self._checkpoint(s, t, ending, m)

    def _choices(
        self, s: int, t: int, ending: SkipSet
    ) -> tuple[OptionTransitions, tuple[tuple[SkipSet, Integers], ...]]:
        """The options at (s,t), and where those stand that leave each set of values to end after them."""
        if (s, t, ending) not in self._options:
            options = self._moves.options(s, t, ending)
            places: dict[SkipSet, list[int]] = {}
            for place, rest in enumerate(options.rest):
                places.setdefault(rest, []).append(place)
            by_rest = tuple((rest, np.array(found, np.int64)) for rest, found in places.items())
            self._options[s, t, ending] = options, by_rest
        return self._options[s, t, ending]

    def _one_block(self, s: int, ending: SkipSet, m: int) -> list[Decision | State]:
        wanted = self._table.row(s, s, ending)[m]
        options, solos = self._moves.options(s, s, ending), self._moves.solos(s, ending)
        hits = options.number[(options.least <= m) & (options.time == wanted)].tolist()
        if hits:
            return [ForwardOption(s, hits[0]), Backward(s, hits[0])]
        return [Solo(s, solos.number[(solos.least <= m) & (solos.time == wanted)].tolist()[0])]

    def _checkpoint(self, s: int, t: int, ending: SkipSet, m: int) -> list[Decision | State]:
        if (s, t, ending) not in self._splits:
            self._splits[s, t, ending] = self._moves.splits(s, t, ending)
        table, splits = self._table, self._splits[s, t, ending]
        wanted, most = table.row(s, t, ending)[m], len(table.top) - 1
        for i in np.flatnonzero(splits.least <= m).tolist():
            j, after, before = int(splits.at[i]), splits.later[i], splits.earlier[i]
            later, earlier = m - int(splits.carried[i]), min(most, m - int(splits.grown[i]))
            time = table.row(j, t, after)[later] + table.row(s, j - 1, before)[earlier] + splits.time[i]
            if time == wanted:
                runs = (Forward(k) for k in range(s, j))
                return [*runs, (j, t, after, later), (s, j - 1, before, earlier)]
        raise AssertionError(f"Opt[{s},{t},{m}] has no decision behind it")

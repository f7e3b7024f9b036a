"""Schedules of a graph that is no training step: any op may run again, in any order, at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import Schedule
from hybridremat.sequence.exchange.order import Order
from hybridremat.sequence.exchange.search import Exchange, simulations_for
from hybridremat.sequence.judge import Judge

TRIES: Final = 1_500
"""Simulations for one order."""

HEATS: Final = (0.0, 0.3)
"""How far an order may get worse on its way, as shares of what is beyond the limit."""

AGAIN: Final = 100
"""How many times an order is looked for that fits with one op less."""

_FOR_ONE: Final = 200
"""Simulations for one of these."""

_DOWN: Final = 5
"""Steps in which a search comes down to a limit for which it finds nothing at once."""


@dataclass(frozen=True)
class DagSearch:
    """A search for the fastest schedule of one graph without a backward, under one limit.

    First an order is looked for that fits as it is. Where none does, room is made by running ops again; then
    ops are left out, by another order or by an exchange. Where no room can be made, it is made little by
    little, under higher limits first.

    Attributes
    ----------
    judge
        Of a graph without a backward.
    limit
        Bytes.
    progress
        Called with (stage, done, total).
    deadline
        When to end with the best so far.
    """

    judge: Judge
    limit: int
    progress: Callable[[str, int, int], None]
    deadline: Deadline = NO_DEADLINE

    def __call__(self, start: Schedule) -> Schedule | None:
        """The fastest schedule that is found; None if none is.

        ``start`` runs each op once. Nothing in it is a forward (``num_forward`` is 0).
        """
        if (found := self._found(self.limit, start)) is not None:
            return found
        most = self.judge.needs(start)
        for step in range(1, _DOWN + 1):
            self.progress("coming down to the limit", step - 1, _DOWN)
            start = self._found(most - (most - self.limit) * step // _DOWN, start) or start
        return start if self.judge.needs(start) <= self.limit else None

    def _found(self, limit: int, start: Schedule) -> Schedule | None:
        repaired = []
        for number, heat in enumerate(HEATS):
            self.progress("searching orders", number, len(HEATS))
            ordered = self._order(limit)(start, TRIES, heat)
            if ordered.beyond == 0:
                return ordered.schedule
            found = self._exchange(limit, simulations_for(start)).repaired(ordered.schedule)
            repaired += [] if found is None else [found]
        if not repaired:
            return None
        shorter = self._reordered(limit, min(repaired, key=self.judge.time))
        self.progress("exchanging", 0, 1)
        exchanged, _ = self._exchange(limit, simulations_for(start))(shorter)
        return self._reordered(limit, exchanged)

    def _order(self, limit: int) -> Order:
        return Order(self.judge, limit, deadline=self.deadline)

    def _exchange(self, limit: int, simulations: int) -> Exchange:
        return Exchange(self.judge, limit, simulations, self.deadline)

    def _reordered(self, limit: int, schedule: Schedule) -> Schedule:
        """The schedule with one op less after another, as long as an order is found that fits."""
        exchange, order = self._exchange(limit, 0), self._order(limit)
        seen: set[Schedule] = set()
        again = True
        while again:
            again = False
            for saved, gone in sorted(exchange.left_out(schedule), key=lambda each: -each[0]):
                shorter = exchange.edits.without(schedule, gone)
                if saved <= 0 or shorter in seen:
                    continue
                if len(seen) == AGAIN or self.deadline.passed:
                    return schedule
                self.progress("leaving ops out", len(seen), AGAIN)
                seen.add(shorter)
                ordered = order(shorter, _FOR_ONE)
                if ordered.beyond == 0 and self.judge.allows(ordered.schedule):
                    schedule, again = ordered.schedule, True
                    break
        return schedule

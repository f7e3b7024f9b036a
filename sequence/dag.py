"""Schedules of a graph that is no training step: any op may run again, in any order, at any time."""

from __future__ import annotations

from typing import Final

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


def dag_schedule(judge: Judge, limit: int, start: Schedule) -> Schedule | None:
    """The fastest schedule that is found under a limit (bytes); None if none is.

    First an order is looked for that fits as it is. Where none does, room is made by running ops again; then
    ops are left out, by another order or by an exchange. Where no room can be made, it is made little by
    little, under higher limits first.

    Parameters
    ----------
    judge
        Of a graph without a backward.
    start
        Each op once. Nothing is a forward (``num_forward`` is 0).
    """
    if (found := _found(judge, limit, start)) is not None:
        return found
    most = judge.needs(start)
    for step in range(1, _DOWN + 1):
        start = _found(judge, most - (most - limit) * step // _DOWN, start) or start
    return start if judge.needs(start) <= limit else None


def _found(judge: Judge, limit: int, start: Schedule) -> Schedule | None:
    repaired = []
    for heat in HEATS:
        ordered = Order(judge, limit)(start, TRIES, heat)
        if ordered.beyond == 0:
            return ordered.schedule
        found = _exchange(judge, limit, start).repaired(ordered.schedule)
        repaired += [] if found is None else [found]
    if not repaired:
        return None
    shorter = _reordered(judge, limit, min(repaired, key=judge.time))
    exchanged, _ = _exchange(judge, limit, start)(shorter)
    return _reordered(judge, limit, exchanged)


def _exchange(judge: Judge, limit: int, start: Schedule) -> Exchange:
    return Exchange(judge, limit, simulations_for(start))


def _reordered(judge: Judge, limit: int, schedule: Schedule) -> Schedule:
    """The schedule with one op less after another, as long as an order is found that fits."""
    exchange, order = Exchange(judge, limit, 0), Order(judge, limit)
    seen: set[Schedule] = set()
    again = True
    while again:
        again = False
        for saved, gone in sorted(exchange.left_out(schedule), key=lambda each: -each[0]):
            shorter = exchange.edits.without(schedule, gone)
            if saved <= 0 or shorter in seen:
                continue
            if len(seen) == AGAIN:
                return schedule
            seen.add(shorter)
            ordered = order(shorter, _FOR_ONE)
            if ordered.beyond == 0 and judge.allows(ordered.schedule):
                schedule, again = ordered.schedule, True
                break
    return schedule

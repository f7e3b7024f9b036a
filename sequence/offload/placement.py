"""Where moves start and end, so that a schedule keeps a limit: one walk along each phase.

In the forward, wherever more is there than the limit, the oldest version without a reader left in the forward
leaves. In the backward, from its end, wherever more would be there, the version whose first reader is latest
has not come back yet. So each leaves as late and comes back as early as the limit lets it, which gives the
link most time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from hybridremat.graph.joint import Move
from hybridremat.graph.memory import Waiting

Key = tuple[int, int]
"""A version: its value, and the execution that makes it."""


@dataclass(frozen=True)
class Unmoved:
    """A schedule without moves, as placement sees it.

    Attributes
    ----------
    profile
        Bytes at each execution.
    times
        Nanoseconds of each execution.
    split
        The number of executions in the forward.
    waiting
        What may move.
    """

    profile: NDArray[np.int64]
    times: tuple[int, ...]
    split: int
    waiting: tuple[Waiting, ...]


def place(step: Unmoved, limit: int, without: Collection[Key] = ()) -> tuple[Move, ...] | None:
    """Moves that bring a schedule under a limit in bytes; None if these walks find none.

    ``without``: versions that stay.
    """
    waiting = [each for each in step.waiting if (each.value, each.birth) not in without]
    free = _leaving(step, limit, waiting)
    fetch = None if free is None else _returning(step, limit, waiting)
    if free is None or fetch is None:
        return None
    moved = sorted(free.keys() | fetch.keys())
    return tuple(
        Move(each.value, each.birth, free.get(number, step.split), fetch.get(number, step.split), each.first)
        for number, each in ((number, waiting[number]) for number in moved)
    )


def _leaving(step: Unmoved, limit: int, waiting: Sequence[Waiting]) -> dict[int, int] | None:
    """By number of what waits: the execution of the forward before which it has left."""
    free: dict[int, int] = {}
    ready: list[tuple[int, int]] = []
    order = sorted(range(len(waiting)), key=lambda number: waiting[number].last)
    seen = gone = 0
    for now in np.flatnonzero(step.profile[: step.split] > limit).tolist():
        while seen < len(order) and waiting[order[seen]].last < now:
            heappush(ready, (waiting[order[seen]].birth, order[seen]))
            seen += 1
        while step.profile[now] - gone > limit:
            if not ready:
                return None
            number = heappop(ready)[1]
            free[number] = now
            gone += waiting[number].bytes
    return free


def _returning(step: Unmoved, limit: int, waiting: Sequence[Waiting]) -> dict[int, int] | None:
    """By number of what waits: the execution of the backward before which it comes back."""
    fetch: dict[int, int] = {}
    ready: list[tuple[int, int]] = []
    order = sorted(range(len(waiting)), key=lambda number: -waiting[number].first)
    seen = gone = 0
    for now in (np.flatnonzero(step.profile[step.split :] > limit)[::-1] + step.split).tolist():
        while seen < len(order) and waiting[order[seen]].first > now:
            heappush(ready, (-waiting[order[seen]].first, order[seen]))
            seen += 1
        while step.profile[now] - gone > limit:
            if not ready:
                return None
            number = heappop(ready)[1]
            fetch[number] = now + 1
            gone += waiting[number].bytes
    return fetch

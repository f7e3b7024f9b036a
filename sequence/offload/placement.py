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

from hybridremat.graph.joint import Move, host_bytes
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
    saved
        Bytes between the phases.
    """

    profile: NDArray[np.int64]
    times: tuple[int, ...]
    split: int
    waiting: tuple[Waiting, ...]
    saved: int = 0


def place(
    step: Unmoved,
    limit: int,
    without: Collection[Key] = (),
    *,
    room: int | None = None,
    saved: int | None = None,
) -> tuple[Move, ...] | None:
    """Moves that bring a schedule under a limit in bytes; None if these walks find none.

    ``without``: versions that stay. ``room``: bytes of host memory, and ``saved``: most bytes that are there
    between the phases; None for any.
    """
    waiting = [each for each in step.waiting if (each.value, each.birth) not in without]
    there = _Room(waiting, room)
    free = _leaving(step, limit, waiting, there, step.saved if saved is None else saved)
    fetch = None if free is None else _returning(step, limit, waiting, there)
    if free is None or fetch is None:
        return None
    moved = sorted(free.keys() | fetch.keys())
    return tuple(
        Move(each.value, each.birth, free.get(number, step.split), fetch.get(number, step.split), each.first)
        for number, each in ((number, waiting[number]) for number in moved)
    )


class _Room:
    """What is left of the host memory; what has a place there needs no other one."""

    def __init__(self, waiting: Sequence[Waiting], left: int | None) -> None:
        self._sizes = [host_bytes([each.bytes]) for each in waiting]
        self._left, self._there = left, set[int]()

    def takes(self, number: int) -> bool:
        """Whether one of what waits has a place, or gets one now."""
        if self._left is None or number in self._there:
            return True
        if self._sizes[number] > self._left:
            return False
        self._left -= self._sizes[number]
        self._there.add(number)
        return True


def _leaving(
    step: Unmoved, limit: int, waiting: Sequence[Waiting], room: _Room, saved: int
) -> dict[int, int] | None:
    """By number of what waits: the execution of the forward before which it has left, or its end."""
    free: dict[int, int] = {}
    ready: list[tuple[int, int]] = []
    order = sorted(range(len(waiting)), key=lambda number: waiting[number].last)
    seen = gone = 0
    over = np.flatnonzero(step.profile[: step.split] > limit).tolist()
    for now in [*over, step.split]:
        while seen < len(order) and waiting[order[seen]].last < now:
            heappush(ready, (waiting[order[seen]].birth, order[seen]))
            seen += 1
        there, most = (step.profile[now], limit) if now < step.split else (step.saved, saved)
        while there - gone > most:
            if not ready:
                return None
            number = heappop(ready)[1]
            if room.takes(number):
                free[number] = now
                gone += waiting[number].bytes
    return free


def _returning(
    step: Unmoved, limit: int, waiting: Sequence[Waiting], room: _Room
) -> dict[int, int] | None:
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
            if room.takes(number):
                fetch[number] = now + 1
                gone += waiting[number].bytes
    return fetch

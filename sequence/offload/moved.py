"""A schedule with the moves that bring it under a limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hybridremat.graph.joint import Schedule
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload.placement import Key, Unmoved, place
from hybridremat.sequence.pool import SchedulePoint

LEAST: Final = 1 << 20
"""Bytes of the smallest version that moves, or this share of the most that is there, if that is less."""

LEAST_SHARE: Final = 1 / 512


def with_moves(
    judge: Judge,
    point: SchedulePoint,
    limit: int,
    without: frozenset[Key] = frozenset(),
    most: int | None = None,
) -> SchedulePoint | None:
    """A schedule with moves that bring it under a limit; None if none are found.

    ``without``: what stays; ``most``: nanoseconds that it may take, and none if that does not do.

    Where others like it wait beside it, they hold less the more moves. At first they are taken to hold
    nothing that may move, then what the moves that were found so leave, and at last all of it.
    """
    bare, saved = replace(point.schedule, moves=()), judge.saved_limit(limit)
    if most is not None and judge.time(bare) > most:
        return None
    away = sum(each.bytes for each in unmoved(judge, bare).waiting) if judge.copies > 1 else 0
    while True:
        step = unmoved(judge, bare, away)
        moves = place(step, limit, without, room=judge.host_room, saved=saved)
        if moves is None:
            return None
        schedule = replace(bare, moves=moves)
        if most is not None and not away and judge.time(schedule) > most:
            return None
        made = judge(schedule, point.decisions)
        if made.needs <= limit:
            fast = most is None or made.time <= most
            found = replace(made, parted=point.parted, chain=point.chain)
            return found if fast and judge.allows(made.schedule) else None
        if not away:
            return None
        left = sum(judge.graph.values[move.value].bytes for move in moves)
        away = left if left < away else 0


def unmoved(judge: Judge, schedule: Schedule, away: int = 0) -> Unmoved:
    """A schedule without moves, as placement sees it; of what other forwards save, so much is ``away``."""
    saved, memory = judge.pins.saved_values(judge.graph), judge.simulate(schedule)
    profile = judge.profile(schedule, replace(memory, saved=memory.saved - away))
    least = min(LEAST, int(profile.max(initial=0) * LEAST_SHARE))
    waiting = judge.simulate.waiting(schedule, least)
    return Unmoved(
        profile,
        tuple(map(judge.graph.op_times.__getitem__, schedule.steps)),
        schedule.num_forward,
        tuple(each for each in waiting if each.value not in saved),
        memory.saved + memory.released,
    )

"""Schedules with moves for a step of several graphs, each of which is chosen beside the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload.moved import unmoved
from hybridremat.sequence.offload.placement import place
from hybridremat.sequence.offload.search import floor
from hybridremat.sequence.parts import judge_of
from hybridremat.sequence.pool import SchedulePoint

FEW: Final = 16
"""Schedules that get moves."""

LEVELS: Final = 4
"""Parts of what waits that is away, from one schedule to the next."""


def varied(judge: Judge, points: Sequence[SchedulePoint]) -> Iterator[SchedulePoint]:
    """Some schedules with moves that leave less and less, for a step whose other graphs need the room.

    At each of :data:`LEVELS`, once as much of what waits is away between the phases, and once also the
    schedule's own peak is so much nearer to what it is with all away.
    """
    for point in points[:: max(1, len(points) // FEW)]:
        near = judge_of(judge, point)
        bare = replace(point.schedule, moves=())
        step, least = unmoved(near, bare), floor(near, point)
        waits, most = sum(each.bytes for each in step.waiting), int(step.profile.max(initial=0))
        for level in range(1, LEVELS + 1):
            saved = step.saved - waits * level // LEVELS
            for limit in (most, most - max(0, most - least) * level // LEVELS):
                moves = place(step, limit, room=near.host_room, saved=saved)
                if moves:
                    made = near(replace(bare, moves=moves), point.decisions)
                    yield replace(made, parted=point.parted, chain=point.chain)

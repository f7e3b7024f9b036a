"""Moves as a search: schedules of the pool that get under the limit by what waits in host memory.

A schedule that needs more than the limit and recomputes less may be faster with moves than one that fits.
The fastest with moves are looked for among all of the pool, and improved by exchanges: a recomputation is
left out, or what would move is made again instead, and the moves are placed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hybridremat.graph.joint import host_bytes
from hybridremat.sequence.bounds import certificate as bounds
from hybridremat.sequence.bounds.certificate import bound_under
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload.exchange import Exchanges
from hybridremat.sequence.offload.moved import unmoved, with_moves
from hybridremat.sequence.parts import judge_of
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.search import Goal, Level, Search, search_all

FEW: Final = 16
"""Schedules that the least memory is looked for among, at each end and between."""

STARTS: Final = 8
"""Schedules that exchanges begin at."""

TRIED: Final = 200
"""Schedules that exchanges place moves for from each of them."""

NEAR: Final = 0.001
"""The share of the bytes within which the least in little host memory is looked for."""

FURTHER: Final = 1200
"""The same from the best that these lead to."""


@dataclass(frozen=True)
class MovesFirst:
    """Moves, and then the searches without them, unless it is proven that these find nothing faster."""

    searches: tuple[Search, ...]

    def __call__(self, judge: Judge, pool: Pool, goal: Goal) -> Pool:
        """See :class:`~hybridremat.sequence.search.Search`."""
        moved = offloading(judge, pool, goal)
        best = moved.under(goal.limit)
        if best is not None and best.schedule.moves and goal.level is not Level.QUICK:
            start = pool.under(goal.limit) or pool.points[0]
            bare = replace(judge, link=None, host_limit=None)
            if bound_under(bare, goal.limit, start.schedule, bounds.QUICK) >= best.time:
                return moved
        return search_all(self.searches, judge, pool, goal).with_points(moved.points)


def offloading(judge: Judge, pool: Pool, goal: Goal) -> Pool:
    """What moves make of the pool's schedules (:class:`~hybridremat.sequence.search.Search`)."""
    if judge.link is None or goal.deadline.passed:
        return pool
    starts = fastest_placed(judge, pool, goal.limit, 1 if goal.level is Level.QUICK else STARTS)
    fastest = min((each.time for each in pool.points), default=0)
    if goal.level is Level.QUICK or not starts or starts[0].time <= fastest:  # nothing waits, or runs again
        return pool.with_points(starts)
    found = [Exchanges(judge_of(judge, start), goal, start) for start in starts]
    for each in found:
        each.go_on(TRIED)
    left = FURTHER
    while left > 0 and (going := [each for each in found if not each.ended]):
        left -= min(going, key=lambda each: each.best.time).go_on(left)
    return pool.with_points([*starts, *(each.best for each in found)])


def fastest_placed(judge: Judge, pool: Pool, limit: int, most: int) -> list[SchedulePoint]:
    """The ``most`` fastest schedules of a pool with moves that bring them under a limit."""
    found: list[SchedulePoint] = []
    for point in sorted(pool.points, key=lambda each: least_time(judge, each, limit)):
        if len(found) >= most and least_time(judge, point, limit) >= found[most - 1].time:
            break
        placed = with_moves(judge_of(judge, point), point, limit)
        if placed is not None:
            found = sorted([*found, placed], key=lambda each: each.time)[:most]
    return found


def least_limit(judge: Judge, points: Sequence[SchedulePoint]) -> int:
    """The least bytes that moves bring one of some schedules under, of a few of them by their bytes.

    The least is near that of the schedules that need least, or of those that recompute least.
    """
    some = {*points[:FEW], *points[:: max(1, len(points) // FEW)], points[-1]}
    return min(floor(judge_of(judge, each), each) for each in some)


def floor(judge: Judge, point: SchedulePoint) -> int:
    """Bytes that a schedule needs with all that waits away whenever it may be."""
    step = unmoved(judge, bare := replace(point.schedule, moves=()))
    if judge.copies > 1:
        step = unmoved(judge, bare, sum(each.bytes for each in step.waiting))
    gone = np.zeros(len(step.profile) + 1, np.int64)
    for each in step.waiting:
        gone[each.last + 1] += each.bytes
        gone[each.first] -= each.bytes
    least = int((step.profile - np.cumsum(gone[:-1])).max())
    if judge.host_room is None or host_bytes(each.bytes for each in step.waiting) <= judge.host_room:
        return least
    return _floor_in_room(judge, point, least)


def _floor_in_room(judge: Judge, point: SchedulePoint, low: int) -> int:
    """Bytes that a schedule needs with what may wait in the host memory that there is."""
    high = point.needs
    while high - low > NEAR * high:
        middle = (low + high) // 2
        found = with_moves(judge, point, middle)
        low, high = (middle, high) if found is None else (low, found.needs)
    return high


def least_time(judge: Judge, point: SchedulePoint, limit: int) -> float:
    """Nanoseconds that a schedule takes at least under a limit: what is too much leaves and comes back."""
    assert judge.link is not None
    gone = max(0, point.needs - limit) / judge.copies  # each one that waits holds less by it
    return max(point.time, gone * 1e9 / judge.link.out + gone * 1e9 / judge.link.back)

"""Moves as a search: schedules of the pool that get under the limit by what waits in host memory.

A schedule that needs more than the limit and recomputes less may be faster with moves than one that fits.
The fastest with moves are looked for among all of the pool, and improved by exchanges: a recomputation is
left out, or what would move is made again instead, and the moves are placed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

import numpy as np

from hybridremat.graph.joint import Schedule, host_bytes
from hybridremat.sequence.bounds import certificate as bounds
from hybridremat.sequence.bounds.certificate import bound_under
from hybridremat.sequence.exchange.edits import Edits
from hybridremat.sequence.exchange.improve import EXECUTIONS_A_SECOND
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload.placement import Key, Unmoved, place
from hybridremat.sequence.parts import judge_of
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.search import Goal, Level, Search, search_all

FEW: Final = 16
"""Schedules that the least memory is looked for among, at each end and between."""

LEAST: Final = 1 << 20
"""Bytes of the smallest version that moves, or this share of the most that is there, if that is less."""

LEAST_SHARE: Final = 1 / 512

STARTS: Final = 8
"""Schedules that exchanges begin at."""

TRIED: Final = 200
"""Schedules that exchanges place moves for from one start; of the first, three times as many."""

PLACING: Final = 4
"""About how many simulations it takes as long as to place the moves of a schedule and time it."""

NEAR: Final = 0.001
"""The share of the bytes within which the least in little host memory is looked for."""

WORTH: Final = 0.0005
"""The least share of the step's time that an exchange has to save."""


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
    found: list[SchedulePoint] = []
    for number, start in enumerate(starts):
        most = _affordable(start, goal, TRIED if number else 3 * TRIED)
        exchanged = Exchanged(judge_of(judge, start), goal, most)
        found.append(exchanged(start))
        if goal.bound is not None:
            tried = most - exchanged.left
            goal.bound.spend(tried * PLACING * len(start.schedule.steps) / EXECUTIONS_A_SECOND)
    return pool.with_points([*starts, *found])


def _affordable(start: SchedulePoint, goal: Goal, most: int) -> int:
    """How many schedules may be placed: of what is left for searches, half at once."""
    if goal.bound is None:
        return most
    left = goal.bound.left(start.time) / 2
    return min(most, int(left * EXECUTIONS_A_SECOND / (PLACING * max(1, len(start.schedule.steps)))))


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


def with_moves(
    judge: Judge, point: SchedulePoint, limit: int, without: frozenset[Key] = frozenset()
) -> SchedulePoint | None:
    """A schedule with moves that bring it under a limit; None if none are found. ``without``: what stays.

    Where others like it wait beside it, they hold less the more moves. At first they are taken to hold
    nothing that may move, then what the moves that were found so leave, and at last all of it.
    """
    bare, saved = replace(point.schedule, moves=()), judge.saved_limit(limit)
    away = sum(each.bytes for each in unmoved(judge, bare).waiting) if judge.copies > 1 else 0
    while True:
        step = unmoved(judge, bare, away)
        moves = place(step, limit, without, room=judge.host_room, saved=saved)
        if moves is None:
            return None
        made = judge(replace(bare, moves=moves), point.decisions)
        if made.needs <= limit:
            found = replace(made, parted=point.parted, chain=point.chain)
            return found if judge.allows(made.schedule) else None
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


class Exchanged:
    """Exchanges in schedules with moves, of one graph under one limit."""

    def __init__(self, judge: Judge, goal: Goal, most: int) -> None:
        self._judge, self._goal, self.left = judge, goal, most
        self._edits = Edits(judge.graph)
        self._seen: set[tuple[Schedule, frozenset[Key]]] = set()

    def __call__(self, start: SchedulePoint) -> SchedulePoint:
        """The fastest schedule that exchanges lead to."""
        best, stays = start, frozenset[Key]()
        while (found := self._faster(best, stays)) is not None:
            best, stays = found
        return best

    def _faster(
        self, best: SchedulePoint, stays: frozenset[Key]
    ) -> tuple[SchedulePoint, frozenset[Key]] | None:
        """A schedule one exchange away that is faster, and what stays on the device there."""
        enough = best.time - max(1, int(WORTH * best.time))
        for schedule, staying in self._near(best.schedule, stays):
            if self.left <= 0 or self._goal.deadline.passed:
                return None
            if (schedule, staying) in self._seen:
                continue
            self._seen.add((schedule, staying))
            self.left -= 1
            point = replace(best, schedule=schedule)
            found = with_moves(self._judge, point, self._goal.limit, staying)
            if found is not None and found.time <= enough:
                return found, staying
        return None

    def _near(
        self, schedule: Schedule, stays: frozenset[Key]
    ) -> Iterator[tuple[Schedule, frozenset[Key]]]:
        """Schedules one exchange away, those that promise most first, each with what is not to move."""
        judge, bare = self._judge, replace(schedule, moves=())
        assert judge.link is not None
        times, versions, numbers = judge.graph.op_times, self._edits.versions(bare), count()
        near: list[tuple[int, int, Schedule, frozenset[Key]]] = []
        for move in schedule.moves:
            size = judge.graph.values[move.value].bytes
            saved = judge.link.out_ns(size) + judge.link.back_ns(size)
            ops = self._edits.made_again(versions, move.value, move.ready)
            if ops:
                again = self._edits.inserted(bare, ops, move.ready)
                near.append((sum(times[op] for op in ops) - saved, next(numbers), again, frozenset()))
            near.append((-saved, next(numbers), bare, stays | {(move.value, move.birth)}))
        done: set[int] = set()
        for now, op in enumerate(bare.steps):
            if now >= bare.num_forward and op in done:
                gone = self._edits.only_for(bare, versions, now)
                less = self._edits.without(bare, gone)
                cost = -sum(times[bare.steps[each]] for each in gone)
                near.append((cost, next(numbers), less, frozenset()))
            done.add(op)
        for _, _, changed, staying in sorted(near, key=lambda each: each[:2]):
            yield changed, staying

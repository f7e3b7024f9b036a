"""Exchanges under moves: a recomputation is left out, or what would move is made again instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from hybridremat.graph.joint import Schedule
from hybridremat.sequence.exchange.edits import Edits
from hybridremat.sequence.exchange.improve import EXECUTIONS_A_SECOND
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload.moved import with_moves
from hybridremat.sequence.offload.placement import Key
from hybridremat.sequence.pool import SchedulePoint
from hybridremat.sequence.search import Goal

PLACING: Final = 4
"""About how many simulations it takes as long as to place the moves of a schedule and time it."""

WORTH: Final = 0.0001
"""The least share of the step's time that an exchange has to save."""


class Exchanges:
    """Exchanges from one schedule with moves, under one limit.

    Attributes
    ----------
    best
        The fastest schedule that they have led to.
    ended
        Whether nothing more can be tried: no exchange makes that one faster, or what may be spent is.
    """

    def __init__(self, judge: Judge, goal: Goal, start: SchedulePoint) -> None:
        self.best, self.ended = start, False
        self._judge, self._goal = judge, goal
        self._edits = Edits(judge.graph)
        self._stays, self._left = frozenset[Key](), 0
        self._seen: set[tuple[Schedule, frozenset[Key]]] = set()

    def go_on(self, most: int) -> int:
        """Place the moves of at most so many schedules, or what may be spent; returns how many it were."""
        may = self._left = self._affordable(most)
        while self._left > 0 and (found := self._faster()) is not None:
            self.best, self._stays = found
        self.ended = self.ended or may < most or self._goal.deadline.passed
        tried = may - self._left
        if self._goal.bound is not None:
            steps = len(self.best.schedule.steps)
            self._goal.bound.spend(tried * PLACING * steps / EXECUTIONS_A_SECOND)
        return tried

    def _affordable(self, most: int) -> int:
        """How many schedules may be placed: of what is left for searches, half at once."""
        if self._goal.bound is None:
            return most
        left = self._goal.bound.left(self.best.time) / 2
        executions = PLACING * max(1, len(self.best.schedule.steps))
        return min(most, int(left * EXECUTIONS_A_SECOND / executions))

    def _faster(self) -> tuple[SchedulePoint, frozenset[Key]] | None:
        """A schedule one exchange away that is faster, and what stays on the device there."""
        most = self.best.time - max(1, int(WORTH * self.best.time))
        for schedule, stays in self._near():
            if (schedule, stays) in self._seen:
                continue
            if self._left <= 0 or self._goal.deadline.passed:
                return None
            self._seen.add((schedule, stays))
            self._left -= 1
            point = replace(self.best, schedule=schedule)
            if (found := with_moves(self._judge, point, self._goal.limit, stays, most)) is not None:
                return found, stays
        self.ended = True
        return None

    def _near(self) -> Iterator[tuple[Schedule, frozenset[Key]]]:
        """Schedules one exchange away, those that promise most first, each with what is not to move.

        What stays promises nothing, as something else has to move for it: that comes last, the largest first.
        """
        schedule, judge = self.best.schedule, self._judge
        bare, none = replace(schedule, moves=()), frozenset[Key]()
        assert judge.link is not None
        times, versions = judge.graph.op_times, self._edits.versions(bare)
        near: list[tuple[int, Callable[[], Schedule]]] = []
        for move in schedule.moves:
            size = judge.graph.values[move.value].bytes
            if ops := self._edits.made_again(versions, move.value, move.ready):
                cost = sum(times[op] for op in ops) - judge.link.out_ns(size) - judge.link.back_ns(size)
                near.append((cost, partial(self._edits.inserted, bare, ops, move.ready)))
        done: set[int] = set()
        for now, op in enumerate(bare.steps):
            if now >= bare.num_forward and op in done:
                gone = self._edits.only_for(bare, versions, now)
                cost = -sum(times[bare.steps[each]] for each in gone)
                near.append((cost, partial(self._edits.without, bare, gone)))
            done.add(op)
        for _, changed in sorted(near, key=lambda each: each[0]):
            yield changed(), none
        for move in sorted(schedule.moves, key=lambda each: -judge.graph.values[each.value].bytes):
            yield bare, self._stays | {(move.value, move.birth)}

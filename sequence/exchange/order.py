"""A local search over the order of a schedule's executions: what runs stays, and some of it runs elsewhere.

Where most is alive beyond a limit, something that waits there is made behind that place, with all that reads
it before; or what still reads it runs before that place, with all that it needs. A change stays that leaves
no more beyond the limit, summed over all places. That single ops do not move between branches is why whole
groups do. It goes by counts of simulated schedules and numbers drawn from a seed, never by a clock.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import Schedule
from hybridremat.sequence.exchange.edits import movable
from hybridremat.sequence.judge import Judge

_REACH: Final = 20
"""Of the executions that may move, the share by which a group goes past the place, at most."""


@dataclass(frozen=True)
class Ordered:
    """A schedule, and the bytes beyond the limit at all of its executions together; 0: it fits."""

    schedule: Schedule
    beyond: int


class Order:
    """Orders of schedules of one graph under a limit in bytes, until a deadline."""

    def __init__(self, judge: Judge, limit: int, seed: int = 0, *, deadline: Deadline = NO_DEADLINE) -> None:
        self._judge, self._limit, self._drawn = judge, limit, random.Random(seed)
        self._deadline = deadline
        made = [value.producer is not None for value in judge.graph.values]
        self._reads = [frozenset(v for v in op.reads if made[v]) for op in judge.graph.ops]
        self._writes = [frozenset(op.writes) for op in judge.graph.ops]
        self._may_move = [movable(op) for op in judge.graph.ops]

    def __call__(self, schedule: Schedule, simulations: int, heat: float = 0.0) -> Ordered:
        """The best order found in so many simulations.

        ``heat``: a change that leaves this share of what is beyond the limit more stays with probability 1/e
        at first, and less often later.
        """
        beyond, profile = self._counted(schedule)
        best = Ordered(schedule, beyond)
        waits = self._waiting(schedule)
        cooling = heat / max(1, simulations)
        while beyond > 0 and simulations > 0 and waits and not self._deadline.passed:
            simulations -= 1
            changed = self._changed(schedule, profile, waits)
            if changed is None:
                continue
            left, found = self._counted(changed)
            worse = cooling * simulations * best.beyond
            if left > beyond and self._drawn.random() >= _likely(left - beyond, worse):
                continue
            schedule, beyond, profile, waits = changed, left, found, self._waiting(changed)
            if beyond < best.beyond:
                best = Ordered(schedule, beyond)
        return best

    def _counted(self, schedule: Schedule) -> tuple[int, NDArray[np.int64]]:
        profile = self._judge.profile(schedule)
        return int(np.maximum(profile - self._limit, 0).sum()), profile

    def _waiting(self, schedule: Schedule) -> list[tuple[int, int, list[int]]]:
        """Of each version that is read in the part that may change: its bytes, birth, and readers there."""
        found: list[tuple[int, int, list[int]]] = []
        now_there: dict[int, list[int]] = {}
        for now, op in enumerate(schedule.steps):
            if now >= schedule.num_forward:
                for value in self._reads[op]:
                    now_there[value].append(now)
            for value in self._writes[op]:
                now_there[value] = []
                found.append((self._judge.graph.values[value].bytes, now, now_there[value]))
        return [each for each in found if each[2]]

    def _changed(
        self, schedule: Schedule, profile: NDArray[np.int64], waits: list[tuple[int, int, list[int]]]
    ) -> Schedule | None:
        """The schedule after one move at a place beyond the limit; None if there the draw moves nothing."""
        split, end = schedule.num_forward, len(schedule.steps)
        over = split + np.flatnonzero(profile[split:] > self._limit)
        if not len(over):
            return None
        top = int(over[self._drawn.randrange(len(over))])
        there = [each for each in waits if each[1] <= top <= each[2][-1]]
        if not there:
            return None
        _, birth, readers = self._drawn.choices(there, [1 + size for size, _, _ in there])[0]
        past = self._drawn.randrange(1 + max(1, (end - split) // _REACH))
        if self._drawn.random() < 0.5 and birth >= split:
            return self._later(schedule, birth, min(end - 1, top + past))
        later = [each for each in readers if each >= top]
        return self._earlier(schedule, later[self._drawn.choice((0, -1))], max(split, top - past))

    def _later(self, schedule: Schedule, place: int, to: int) -> Schedule | None:
        """The schedule in which an execution, and what needs it until ``to``, runs right after that."""
        made, moved, kept = set[int](), list[int](), list[int]()
        for op in schedule.steps[place : to + 1]:
            if not moved or not made.isdisjoint(self._reads[op]):
                if not self._may_move[op]:
                    return None
                moved.append(op)
                made |= self._writes[op]
            else:
                kept.append(op)
                made -= self._writes[op]  # from here on another version is read
        return self._joined(schedule, place, [*kept, *moved], to)

    def _earlier(self, schedule: Schedule, place: int, to: int) -> Schedule | None:
        """The schedule in which an execution, and what it needs since ``to``, runs right before that."""
        needed, moved, kept = set[int](), list[int](), list[int]()
        for op in reversed(schedule.steps[to : place + 1]):
            if not moved or not needed.isdisjoint(self._writes[op]):
                if not self._may_move[op]:
                    return None
                moved.append(op)
                needed = (needed - self._writes[op]) | self._reads[op]
            else:
                kept.append(op)
        return self._joined(schedule, to, [*moved[::-1], *kept[::-1]], place)

    @staticmethod
    def _joined(schedule: Schedule, start: int, between: list[int], to: int) -> Schedule:
        steps = (*schedule.steps[:start], *between, *schedule.steps[to + 1 :])
        return Schedule(steps, schedule.num_forward)


def _likely(more: int, heat: float) -> float:
    return math.exp(-more / heat) if heat > 0 else 0.0

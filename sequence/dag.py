"""Schedules of a graph that is no training step: any op may run again, in any order, at any time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.sequence.dag_runs import Dag, Numbers, Runs, There

MOVES: Final = 400
"""Moves that are tried for an order with an execution less; a quarter of it after each that makes room."""

LEVELS: Final = (1, 2, 3, 5)
"""Steps in which room is made: where none is found at once, under higher limits first."""

STARTS: Final = 5
"""Times that a small graph is searched from the start, with other numbers drawn."""

OPS: Final = 250
"""Ops that are planned in all of them together; so many or more are searched once."""

EXCHANGES: Final = 150
"""How many times an execution is left out, and other room made for what is then kept."""

_PLACES: Final = 3
"""Places at which room is looked for: those where most is there."""

_TRIED: Final = 12
"""Outputs that are made again to see what it is worth, those that seem to be worth most first."""

_CHAIN: Final = 12
"""Executions that run again for one of them, at most."""

_REACH: Final = 10
"""Of the executions, the share by which one goes past the place that it makes room at, at most."""


@dataclass(frozen=True, eq=False)
class Ordered:
    """Executions in an order, and the bytes beyond a limit at all of them together; 0: it fits."""

    runs: Runs
    order: Numbers
    beyond: int


@dataclass(frozen=True)
class DagSearch:
    """A search for the fastest schedule of a graph under a limit in bytes.

    Room is made by running ops again, each time that which frees most for its time, or only elsewhere; orders
    are looked for in between. Then executions are left out, one after the other, and other room is made in
    less time. It goes by counts and numbers drawn from a seed, never by a clock; ``progress`` is called with
    (stage, done, total).
    """

    dag: Dag
    limit: int
    progress: Callable[[str, int, int], None]
    deadline: Deadline = NO_DEADLINE
    drawn: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self) -> tuple[int, ...] | None:
        """The ops of the fastest schedule found, one after the other; None if none is."""
        once = self._counted(Runs.once(self.dag), np.arange(len(self.dag.reads)), self.limit)
        best: Ordered | None = None
        for _ in range(min(STARTS, max(1, OPS // len(self.dag.reads)))):
            roomy = self._roomy(once)
            found = None if roomy is None else self._shorter(roomy)
            if best is None or (found is not None and found.runs.time < best.runs.time):
                best = found
            if best is not None and best.runs.time == once.runs.time:
                break
        return None if best is None else tuple(best.runs.ops[run] for run in best.order.tolist())

    def _roomy(self, once: Ordered) -> Ordered | None:
        """The fastest of those that fit, by way of no or some higher limits."""
        most, fit = int(once.runs.there(once.order).level.max()), list[Ordered]()
        for number, levels in enumerate(LEVELS):
            self.progress("making room", number, len(LEVELS))
            found: Ordered | None = once
            for level in range(1, levels + 1):
                if found is not None:
                    limit = most - (most - self.limit) * level // levels
                    found = self._with_room(found.runs, found.order, limit, None)
            fit += [] if found is None else [found]
        return min(fit, key=lambda found: found.runs.time, default=None)

    def _shorter(self, best: Ordered) -> Ordered:
        """Executions left out, as long as it saves time, and so many times."""
        seen = 0
        again = True
        while again:
            again = False
            for run in best.runs.again:
                if seen == EXCHANGES or self.deadline.passed:
                    return best
                self.progress("leaving executions out", seen, EXCHANGES)
                seen += 1
                runs, order = best.runs.left_out(best.order, run)
                saved = best.runs.time - runs.time
                if saved <= 0:
                    continue
                fewer = self._reordered(self._counted(runs, order, self.limit), self.limit, MOVES)
                found = self._with_room(fewer.runs, fewer.order, self.limit, saved - 1)
                if found is not None:
                    best, again = found, True
                    break
        return best

    def _with_room(self, runs: Runs, order: Numbers, limit: int, most: int | None) -> Ordered | None:
        """Executions of ops that run again, in at most so much more time, until all fits; None if not."""
        now = self._counted(runs, order, limit)
        latest = math.inf if most is None else runs.time + most
        while now.beyond and not self.deadline.passed:
            roomier = self._roomier(now, limit, latest)
            if roomier is None:
                return None
            now = self._reordered(roomier, limit, MOVES // 4)
        return None if now.beyond else now

    def _roomier(self, now: Ordered, limit: int, latest: float) -> Ordered | None:
        """With executions more: of what waits where most is there, that which frees most for its time."""
        runs, there = now.runs, now.runs.there(now.order)
        over = np.flatnonzero(there.level > limit)
        for top in over[np.argsort(-there.level[over], kind="stable")][:_PLACES].tolist():
            waits = np.flatnonzero((there.place < top) & (there.last > top))
            idle = [
                run for run in waits.tolist() if all(there.place[each] != top for each in runs.readers[run])
            ]

            def for_its_time(run: int, top: int = top) -> float:
                return self._freed(runs, there, run, top, limit) / (1 + self.dag.times[runs.ops[run]])

            best, most = None, 0.0
            for run in sorted(idle, key=for_its_time, reverse=True)[:_TRIED]:
                for found in self._made_again(now, there, run, top, limit):
                    if found.runs.time > latest:
                        break
                    worth = (now.beyond - found.beyond) / (1 + max(0, found.runs.time - runs.time))
                    if worth > most:
                        best, most = found, worth
            if best is not None:
                return best
        return None

    def _made_again(self, now: Ordered, there: There, run: int, top: int, limit: int) -> Iterator[Ordered]:
        """An output that is made again behind a place; then with what would wait there only for that, too."""
        runs, order = now.runs.made_again(now.order, there, run, top)
        yield self._counted(*runs.without_unread(order), limit)
        first = len(now.runs.ops)  # the new ones come behind all others, in number and in place
        while len(runs.ops) < first + _CHAIN:
            there = runs.there(order)
            for maker in sorted({maker for makers in runs.makers[first:] for maker in makers}):
                others = [int(there.place[each]) for each in runs.readers[maker] if each < first]
                since = max([int(there.place[maker]), *others])
                if maker < first and since <= top:
                    runs, order = runs.made_again(order, there, maker, since)
                    yield self._counted(*runs.without_unread(order), limit)
                    break
            else:
                return

    def _freed(self, runs: Runs, there: There, run: int, top: int, limit: int) -> int:
        """About how many bytes fewer are beyond the limit if what reads it behind a place reads a new one."""
        places = there.place[runs.readers[run]]
        at = int(places[places > top].min())
        start = int(max(there.place[run], places[places < top].max(initial=0)))
        level = there.level.copy()
        level[start + 1 : at] -= runs.bytes[run]
        for maker in runs.made_of(there, run, at):
            level[there.last[maker] + 1 : at] += runs.bytes[maker]
        return int(np.maximum(there.level - limit, 0).sum() - np.maximum(level - limit, 0).sum())

    def _counted(self, runs: Runs, order: Numbers, limit: int) -> Ordered:
        return Ordered(runs, order, runs.there(order).beyond(limit))

    def _reordered(self, start: Ordered, limit: int, moves: int) -> Ordered:
        """The order that so many moves lead to, of which those stay that leave no more beyond the limit."""
        runs, order, beyond = start.runs, start.order, start.beyond
        there = runs.there(order)
        for _ in range(moves):
            if not beyond or self.deadline.passed:
                break
            run, to = self._move(runs, there, limit)
            changed = None if to == there.place[run] else runs.moved(order, there, run, to)
            if changed is not None and (found := runs.there(changed)).beyond(limit) <= beyond:
                order, there, beyond = changed, found, found.beyond(limit)
        return Ordered(runs, order, beyond)

    def _move(self, runs: Runs, there: There, limit: int) -> tuple[int, int]:
        """An execution, and the place that it is to go to.

        Half of the time any; else, where too much is there, what waits there goes behind it, or what reads
        that before it.
        """
        end, drawn = len(runs.ops) - 1, self.drawn
        over = np.flatnonzero(there.level > limit)
        top = int(over[drawn.randrange(len(over))])
        waits = np.flatnonzero((there.place <= top) & (there.last >= top) & (there.last > there.place))
        if drawn.random() < 0.5 or not len(waits):
            run = drawn.randrange(end + 1)
            far = 1 + int((end + 1) ** drawn.random())
            to = int(there.place[run]) + (far if drawn.random() < 0.5 else -far)
            return run, min(end, max(0, to))
        weights = np.cumsum(runs.bytes[waits] + 1)
        waiting = int(waits[np.searchsorted(weights, drawn.randrange(int(weights[-1])), side="right")])
        past = int((1 + end // _REACH) ** drawn.random()) - 1
        if drawn.random() < 0.5:
            return waiting, min(end, top + past)
        behind = [reader for reader in runs.readers[waiting] if there.place[reader] >= top]
        last = max(behind, key=lambda reader: int(there.place[reader]))
        return (last if drawn.random() < 0.5 else drawn.choice(behind)), max(0, top - past)

"""A local search over schedules: leave a recomputation out, and make room for what is then kept.

A recomputation is left out, what reads its result reads the version before, and where that takes the step
beyond the limit room is made: at the highest point, values that wait there for a reader are made again for
it, ops that still read them run earlier, or ops that made them run later. Of such exchanges those are kept
that take less time. It starts from the schedules around the limit, of which those that need a little more
only have to be repaired.

Blocks end where the chain cuts, and a schedule of blocks keeps or makes again what stands at the cuts; an
exchange does not know blocks. It goes by counts of simulated schedules, never by a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import Schedule
from hybridremat.sequence.exchange.edits import Edits, Version, Versions
from hybridremat.sequence.judge import Judge

EXECUTIONS: Final = 800_000
"""Executions that are simulated, at most: a second or two. Schedules of many ops get fewer simulations."""

LEAST_SIMULATIONS: Final = 650
"""Simulated schedules, whatever their length."""

WORTH: Final = (0.0005, 0.0001, 0.00002)
"""The least shares of the step's time that an exchange has to save: coarse ones first, to be spent well."""

AGAIN: Final = 150
"""Of the simulated schedules, those of a second pass, which makes gradients that nobody reads later."""

_ROOMS: Final = 8
"""Changes that make room for one recomputation that is left out."""

_TRIED: Final = 16
"""Changes that are simulated for each of them, those of least time first."""

_SMALL: Final = 0.05
"""Of what is beyond the limit: smaller values are not looked at."""


def simulations_for(schedule: Schedule) -> int:
    """How many schedules about as long as this one may be simulated."""
    return max(LEAST_SIMULATIONS, EXECUTIONS // max(1, len(schedule.steps)))


@dataclass
class Exchange:
    """Exchanges in schedules of one graph.

    Attributes
    ----------
    judge
        What schedules cost, and which are allowed.
    limit
        Bytes that they may need.
    simulations
        How many more may be simulated.
    deadline
        When to end with the best so far.
    coarse
        What the coarse exchanges of each pass have led to, as a call returns it: finer ones may need more.
    """

    judge: Judge
    limit: int
    simulations: int = LEAST_SIMULATIONS
    deadline: Deadline = NO_DEADLINE

    def __post_init__(self) -> None:
        self.graph = self.judge.graph
        self.edits = Edits(self.graph)
        self._again, self._kept = False, 0  # the second pass, and simulations that are kept for it
        self.coarse: list[tuple[Schedule, int]] = []

    def __call__(self, start: Schedule, beyond: Sequence[Schedule] = ()) -> tuple[Schedule, int]:
        """The best schedule found: ``start``, which fits, or a faster one that fits as well.

        Parameters
        ----------
        start
            A schedule under the limit.
        beyond
            Faster schedules that need a little more than the limit.

        Returns
        -------
        tuple
            The schedule, and which one it was made of: 0 for ``start``, 1 for the first of ``beyond``.
        """
        best = start, 0
        worths = [max(1, int(worth * self.judge.time(start))) for worth in WORTH]
        for self._again in (False, True):
            self._kept = 0 if self._again else min(AGAIN, self.simulations // 4)
            best = self._improved(*best, beyond, worths)
        return best

    def _improved(
        self, best: Schedule, origin: int, beyond: Sequence[Schedule], worths: Sequence[int]
    ) -> tuple[Schedule, int]:
        time = self.judge.time(best)
        for number, schedule in enumerate(beyond, 1):
            most = time - worths[0]
            if self._spent or self.judge.time(schedule) > most:
                continue
            if (found := self._fitting(schedule, most)) is not None:
                best, origin, time = found, number, self.judge.time(found)
        for number, least in enumerate(worths):
            while (found := self._exchanged(best, time - least)) is not None:
                best, time = found, self.judge.time(found)
            if number == 0:
                self.coarse.append((best, origin))
        return best, origin

    @property
    def _spent(self) -> bool:
        return self.simulations <= self._kept or self.deadline.passed

    def _exchanged(self, schedule: Schedule, most: int) -> Schedule | None:
        """A schedule that takes at most ``most``, one exchange away."""
        seen: set[Schedule] = set()
        now = self.judge.time(schedule)
        for saved, gone in sorted(self.left_out(schedule), key=lambda each: -each[0]):
            if now - saved > most or self._spent:
                return None
            faster = self.edits.without(schedule, gone)
            if faster not in seen:
                seen.add(faster)
                if (found := self._fitting(faster, most)) is not None:
                    return found
        return None

    def repaired(self, schedule: Schedule) -> Schedule | None:
        """A schedule with room made for it in any time, until it fits; None if it does not come to that."""
        most = self.judge.time(schedule) * len(schedule.steps)
        return self._fitting(schedule, most, rooms=self.simulations)

    def left_out(self, schedule: Schedule) -> Iterator[tuple[int, frozenset[int]]]:
        """The places of each recomputation with what is only for it, and the nanoseconds that they take."""
        done: set[int] = set()
        versions, times = self.edits.versions(schedule), self.graph.op_times
        for now, op in enumerate(schedule.steps):
            if now >= schedule.num_forward and op in done:
                gone = self.edits.only_for(schedule, versions, now)
                yield sum(times[schedule.steps[each]] for each in gone), gone
            done.add(op)

    def _fitting(self, schedule: Schedule, most: int, rooms: int = _ROOMS) -> Schedule | None:
        """The schedule with room made until it fits, in at most ``most`` nanoseconds."""
        excess, top = self._counted(schedule)
        for _ in range(rooms):
            if excess <= 0 or self._spent:
                break
            best = None
            for changed in self._with_room(schedule, top, excess, most):
                found = self._counted(changed)
                if best is None or found[0] < best[1]:
                    best = changed, *found
                if found[0] <= 0:
                    break
            if best is None or best[1] >= excess:
                return None
            schedule, excess, top = best
        fits = excess <= 0 and self.judge.time(schedule) <= most
        return schedule if fits and self.judge.allows(schedule) else None

    def _counted(self, schedule: Schedule) -> tuple[int, int]:
        self.simulations -= 1
        return self.judge.beyond(schedule, self.limit)

    def _with_room(self, schedule: Schedule, top: int, excess: int, most: int) -> list[Schedule]:
        """Changes that may take something away from the highest point, those of least time first."""
        versions, times = self.edits.versions(schedule), self.graph.op_times
        returned = self._returned(schedule, versions, top, _SMALL * excess) if self._again else []
        spare = most - self.judge.time(schedule)
        moves: list[Schedule] = []
        again: list[tuple[int, int, int, list[int]]] = []
        for version, reader in self._waiting(schedule, versions, top, _SMALL * excess):
            moves += self._moved(schedule, versions, version, top)
            if reader >= schedule.num_forward:
                ops = self.edits.made_again(versions, version.value, reader)
                time = sum(times[op] for op in ops or ())
                if ops is not None and time <= spare:
                    again.append((time, -self.graph.values[version.value].bytes, reader, ops))
        again.sort(key=lambda each: each[:3])
        inserted = [self.edits.inserted(schedule, ops, before) for _, _, before, ops in again[:_TRIED]]
        return [*returned[:_TRIED], *moves[:_TRIED], *inserted]

    def _waiting(
        self, schedule: Schedule, versions: Versions, top: int, least: float
    ) -> Iterator[tuple[Version, int]]:
        """The versions of at least so many bytes that wait at a place, each with its first reader there."""
        for value in dict.fromkeys(self.judge.simulate.alive_beyond(schedule, top)):
            version = versions.at(value, top) if self.graph.values[value].bytes >= least else None
            if version is not None and top not in version.reads:
                later = bisect_right(version.reads, top)
                if later < len(version.reads):
                    yield version, version.reads[later]

    def _moved(
        self, schedule: Schedule, versions: Versions, version: Version, top: int
    ) -> Iterator[Schedule]:
        """The schedule with a version's readers before the highest point, and with its maker behind it."""
        if top >= schedule.num_forward:
            changed = self.edits.advanced(schedule, versions, version, top)
            if changed is not None:
                yield changed
        if version.reads[0] > top:
            changed = self.edits.postponed(schedule, versions, version, version.reads[0])
            if changed is not None:
                yield changed

    def _returned(self, schedule: Schedule, versions: Versions, top: int, least: float) -> list[Schedule]:
        """The schedule with each gradient that nobody reads behind the highest point, the largest first."""
        if not top > schedule.num_forward:
            return []
        there = self.judge.simulate.alive_beyond(schedule, top)
        sizes = {value: self.graph.values[value].bytes for value in there if value in self.graph.gradients}
        found: list[Schedule] = []
        for value in sorted(sizes, key=lambda each: (-sizes[each], each)):
            version = versions.at(value, top) if sizes[value] >= least else None
            if version is not None and not version.reads:
                changed = self.edits.postponed(schedule, versions, version, top + 1)
                found += [] if changed is None else [changed]
        return found

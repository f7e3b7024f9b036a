"""Improvements at points of a frontier: where exchanges begin, how hard they try, and what is known already.

One point is improved thoroughly, for a plan, or quickly, where there are many. What was found thoroughly is
kept, so that the same limit has the same answer in every call; what was found quickly is not. A plan's point
is polished as well (:mod:`hybridremat.sequence.polish`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import Schedule, ops_by_parts
from hybridremat.planning.effort import SearchBound
from hybridremat.planning.progress import Progress, no_progress
from hybridremat.plans.certify import bound_under
from hybridremat.sequence.bounds.certificate import QUICK as QUICK_BOUND
from hybridremat.sequence.bounds.certificate import time_once
from hybridremat.sequence.exchange.search import Exchange, simulations_for
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import SchedulePoint

BEYOND: Final = 24
"""Candidates beyond a limit that exchanges try to bring under it."""

BEYOND_QUICKLY: Final = 6
"""The same, where there are many limits."""

ABOVE: Final = (0.3, 0.1)
"""Higher limits from which exchanges come down to the limit: shares of the way to the plain step's peak."""

QUICK: Final = 200
"""Simulated schedules at one point, where there are many."""

PROMISING: Final = 0.01
"""The share of its time that a plan has to be from the bound, for it to be polished."""


EXECUTIONS_A_SECOND: Final = 250_000
"""Executions that exchanges simulate on a nominal core."""

A_DETERMINISTIC_SECOND: Final = 3.5
"""Seconds of a nominal core that polishing takes for each deterministic one of CP-SAT."""

LEAST_POLISHING: Final = 0.05
"""Deterministic seconds below which nothing is polished."""

NEAR: Final = 0.05
"""What is near a limit: a share of it, beyond it. What is below is slower."""


def higher_limits(limit: int, plain_peak: int) -> tuple[int, ...]:
    """The limits in bytes from which exchanges come down to a limit, the highest first."""
    return tuple(limit + int(share * (plain_peak - limit)) for share in ABOVE)


def search_ranges(limit: int, plain_peak: int) -> tuple[tuple[int, int], ...]:
    """The ranges of bytes in which exchanges under a limit begin: just beyond it, and at the higher limits.

    Bytes as the limit counts them. For a limit beyond the plain peak the higher ones are lower; a plan is
    found all the same, since the plain step then fits.
    """
    higher = higher_limits(limit, plain_peak)
    return (limit, int(limit * (1 + NEAR))), *((each, each) for each in higher)


@dataclass
class Improvement:
    """Improves candidates of one frontier, by rising peak; ``plain_peak`` is the plain step's in bytes.

    Once the ``deadline`` has passed, what it is asked to improve is its answer. ``bound`` says what searches
    may spend in all.
    """

    judge: Judge
    candidates: Sequence[SchedulePoint]
    plain_peak: int
    deadline: Deadline = NO_DEADLINE
    progress: Progress = no_progress
    bound: SearchBound | None = None
    _known: dict[tuple[SchedulePoint, int], SchedulePoint] = field(default_factory=dict, repr=False)
    _polished: dict[tuple[SchedulePoint, int], SchedulePoint] = field(default_factory=dict, repr=False)

    def under(self, candidate: SchedulePoint, limit: int) -> SchedulePoint:
        """The best that exchanges find under a limit that the candidate keeps, thoroughly.

        A result is reused at exactly its own memory limit: asked for at the least limit that was reported, it
        is the step that was reported.
        """
        key = candidate, limit
        if key not in self._known:
            beyond = [*self._from_above(candidate, limit), *self._next(candidate, BEYOND)]
            effort = simulations_for(candidate.schedule)
            found = self._exchanged(candidate, limit, beyond, effort)
            self._known[key] = found
            self._known.setdefault((found, found.needs), found)
        return self._known[key]

    def quickly(self, candidate: SchedulePoint, limit: int) -> SchedulePoint:
        """The best of a quick search under a limit, begun at what exchanges lead to under higher ones."""
        return self._quickly(candidate, limit, self._from_above(candidate, limit))

    def down_from(
        self, found: SchedulePoint, candidate: SchedulePoint, limit: int
    ) -> SchedulePoint:
        """The best of a quick search under a limit, begun at what was ``found`` under a higher one, too."""
        return self._quickly(candidate, limit, [found])

    def polished(self, candidate: SchedulePoint, limit: int) -> SchedulePoint:
        """The best that CP-SAT finds under a limit that the candidate keeps; itself if nothing is gained.

        Where a bound says that little could be gained, nothing is searched.
        """
        key = candidate, limit
        if key not in self._polished:
            self._polished[key] = self._after_polish(candidate, limit)
        return self._polished[key]

    def _after_polish(self, candidate: SchedulePoint, limit: int) -> SchedulePoint:
        if candidate.chain is None or self.deadline.passed:
            return candidate
        effort = self._polishing(candidate, limit)
        if effort <= 0:
            return candidate
        from hybridremat.sequence.polish import search as polish_search

        polish = polish_search.Polish(
            self._judge_of(candidate),
            limit,
            effort=effort,
            deadline=self.deadline,
            report=lambda spent: self.progress("polishing", round(100 * spent), 100),
        )
        schedule = polish(candidate.schedule)
        if self.bound is not None:
            prepared = polish_search.preparation_seconds(candidate.schedule)
            self.bound.spend(prepared + polish.spent * A_DETERMINISTIC_SECOND)
        if schedule == candidate.schedule:
            return candidate
        return self._replaced(candidate, candidate, schedule)

    def _polishing(self, candidate: SchedulePoint, limit: int) -> float:
        """CP-SAT's deterministic seconds for a candidate; 0 if no schedule takes a good deal less time."""
        worth = int(candidate.time * (1 - PROMISING))
        if worth < time_once(self.judge.graph) or self._polishing_left(candidate) <= 0:
            return 0.0
        bound = bound_under(self.judge, limit, candidate.schedule, QUICK_BOUND)
        return self._polishing_left(candidate, bound) if bound <= worth else 0.0

    def _polishing_left(self, candidate: SchedulePoint, bound: int | None = None) -> float:
        """Deterministic seconds that are left for a candidate; too few to begin are none."""
        from hybridremat.sequence.polish import search as polish_search  # programs of its own

        if self.bound is None:
            return polish_search.EFFORT
        left = self.bound.left(candidate.time, bound) - polish_search.preparation_seconds(candidate.schedule)
        searching = left / A_DETERMINISTIC_SECOND
        return min(polish_search.EFFORT, searching) if searching >= LEAST_POLISHING else 0.0

    def along(self, chosen: Sequence[SchedulePoint], report: Callable[[int], None]) -> list[SchedulePoint]:
        """What exchanges find quickly at some candidates, by rising peak, each under its own.

        From the highest peak down: what was found there is tried at the next lower one as well.
        """
        found: list[SchedulePoint] = []
        for done, candidate in enumerate(reversed(chosen)):
            report(done)
            found.append(self._quickly(candidate, candidate.needs, found[-1:]))
        return found

    def settle(self, candidates: Sequence[SchedulePoint]) -> None:
        """Let candidates be the answers for limits of their own peaks."""
        self._known.update({(each, each.needs): each for each in candidates})

    def _quickly(
        self, candidate: SchedulePoint, limit: int, first: Sequence[SchedulePoint]
    ) -> SchedulePoint:
        beyond = [*first, *self._next(candidate, BEYOND_QUICKLY)]
        return self._exchanged(candidate, limit, beyond, QUICK)

    def _from_above(self, candidate: SchedulePoint, limit: int) -> list[SchedulePoint]:
        """What exchanges lead to under some higher limits, each from the one before."""
        last: list[SchedulePoint] = []
        for higher in higher_limits(limit, self.plain_peak):
            fitting = [c for c in self.candidates if c.needs <= higher]
            if fitting and fitting[-1] != candidate:
                last = [self._quickly(fitting[-1], higher, last)]
        return last

    def _next(self, candidate: SchedulePoint, count: int) -> list[SchedulePoint]:
        """The ``count`` candidates that are a little faster, and need a little more."""
        faster = [c for c in self.candidates if c.time < candidate.time]
        return [c for c in faster[:count] if c.chain is not None]

    def _exchanged(
        self,
        candidate: SchedulePoint,
        limit: int,
        beyond: Sequence[SchedulePoint],
        simulations: int,
    ) -> SchedulePoint:
        """The candidate that exchanges lead to; itself if they gain nothing, or if it is a forward alone."""
        if candidate.chain is None or self.deadline.passed:
            return candidate
        starts = [candidate, *beyond]
        schedules = [each.schedule for each in starts]
        simulations = self._simulations(candidate, simulations)
        exchange = Exchange(self._judge_of(candidate), limit, simulations, self.deadline)
        schedule, origin = exchange(schedules[0], schedules[1:])
        if self.bound is not None:
            simulated = simulations - exchange.simulations
            self.bound.spend(simulated * len(schedules[0].steps) / EXECUTIONS_A_SECOND)
        if schedule == schedules[0]:
            return candidate
        return self._replaced(candidate, starts[origin], schedule)

    def _simulations(self, candidate: SchedulePoint, most: int) -> int:
        """How many schedules may be simulated: of what is left for searches, half at once."""
        if self.bound is None:
            return most
        left = self.bound.left(candidate.time) / 2
        return min(most, int(left * EXECUTIONS_A_SECOND / max(1, len(candidate.schedule.steps))))

    def _judge_of(self, candidate: SchedulePoint) -> Judge:
        """The judge of the graph as a candidate runs it."""
        return self.judge.with_ops_of(ops_by_parts(self.judge.graph, candidate.parted))

    def _replaced(
        self, start: SchedulePoint, origin: SchedulePoint, schedule: Schedule
    ) -> SchedulePoint:
        """The point of a schedule that exchanges led to from ``origin``, in place of ``start``."""
        if not origin.decisions:  # the plain step, or repaired from it
            origin = start
        composed_time = start.time if start.composed_time is None else start.composed_time
        point = self._judge_of(start)(schedule, origin.decisions)
        return replace(point, parted=start.parted, composed_time=composed_time, chain=origin.chain)

"""The frontier of a step that runs op by op, and the choice of its point under a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Self

from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import Schedule, as_plain
from hybridremat.planning.graph_frontier import CountedGraph, GraphFrontier
from hybridremat.planning.limit_errors import infeasible, too_slow
from hybridremat.planning.progress import Progress, no_progress
from hybridremat.plans.judging import plan_judge
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import FrontierPoint
from hybridremat.sequence.bounds.certificate import MANY, heaviest_op, least_peak_bound, time_once
from hybridremat.sequence.effort import SearchBound
from hybridremat.sequence.exchange.search import WORTH
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.outside_memory import Moment
from hybridremat.sequence.parts import judge_of
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.search import Goal, Level, Search, search_all
from hybridremat.sequence.strategies.layers import layers_again

MOST_FAILURES: Final = 3
"""Limits in a row at which searches fail to be fast enough, after which no lower one is tried."""

AROUND_LEAST: Final = 1.15
"""Times the least memory: up to there a plan may be slower than what a thorough search at the least finds.
On 15 steps plans for so much took at least 2 % less."""


@dataclass(frozen=True)
class StepFrontier(CountedGraph, GraphFrontier):
    """The frontier of a step that runs op by op.

    Attributes
    ----------
    searches
        What looks further under each limit that is asked for.
    deadline
        When searches end with what they have.
    progress
        Called with (stage, done, total) by searches that take long.
    least_searched
        Whether the least memory is what a search of the whole graph has found, and not that of the blocks.
    like
        A frontier of the same step at other sizes, which may know already what depends on none.
    """

    searches: tuple[Search, ...] = ()
    deadline: Deadline = field(default=NO_DEADLINE, compare=False)
    progress: Progress = field(default=no_progress, compare=False)
    least_searched: bool = False
    like: StepFrontier | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, object]:
        """Pickled without the bar of the planning that is over."""
        return {**vars(self), "progress": no_progress}

    @property
    def counted(self) -> Self:  # type: ignore[override]
        """See :class:`GraphFrontier`."""
        return self

    @property
    def choosing(self) -> str:  # type: ignore[override]
        """See :class:`GraphFrontier`."""
        return "improve" if self.searches else ""

    def offered(self) -> tuple[SchedulePoint, ...]:
        """See :class:`GraphFrontier`."""
        if not self._places_moves or not self.judge.with_saved:  # it is the step: searches place moves
            return self.candidates
        from hybridremat.sequence.offload.varied import varied  # not where nothing moves

        return (*self.candidates, *dict.fromkeys(varied(self.judge, self.candidates)))

    def as_planned(self, plan: PlanData) -> SchedulePoint:
        """See :class:`GraphFrontier`."""
        assert plan.details is not None
        return plan_judge(plan, plan.details)(plan.schedule)

    def shown_by(self, progress: Progress) -> Self:
        """See :class:`GraphFrontier`."""
        if self.searches:
            progress("solving" if self.least_searched else "improving", 0, 1)
        return self

    # --- before a limit is searched for

    def composed_under(self, limit: int | None) -> int | None:
        """Nanoseconds of the fastest candidate under a limit (bytes), or of all; None if none fits."""
        found = self.fastest if limit is None else self.pool.under(limit)
        return None if found is None else found.time

    def gap_under(self, limit: int | None) -> float:
        """What could be won at most of that time, as a share of the plain step's; 0 where nothing fits."""
        time = self.composed_under(limit)
        return 0.0 if time is None else (time - self.time_once) / max(1, self.plain.time)

    @cached_property
    def time_once(self) -> int:
        """Nanoseconds of what runs in any schedule."""
        return time_once(self.graph)

    @property
    def least_composed(self) -> SchedulePoint:
        """The point of least memory that blocks can be composed for; of several, the fastest."""
        return self.pool.base[0]

    def proves_infeasible(self, limit: int) -> bool:
        """See :class:`GraphFrontier`. With moves, by the op alone that takes most."""
        if self.judge.link is not None:
            return heaviest_op(self.graph)[1] > limit
        return least_peak_bound(self.graph, self.least_composed.schedule, MANY) > limit

    # --- searches

    def _found(
        self,
        pool: Pool,
        limit: int,
        level: Level = Level.FULL,
        beyond: tuple[SchedulePoint, ...] | None = None,
    ) -> Pool:
        """The pool with what is found under a limit; searches begin at what has no moves."""
        moved = [each for each in pool.points if each.schedule.moves]
        if moved:
            pool = replace(pool, points=tuple(each for each in pool.points if not each.schedule.moves))
        if beyond is not None:
            beyond = tuple(each for each in beyond if not each.schedule.moves)
        goal = Goal(limit, self.plain.peak, level, beyond, self.deadline, self._bound, self.progress)
        found = search_all(self.searches, self.judge, pool, goal)
        return found.with_points(moved) if moved else found

    def best(
        self, limit: int, level: Level = Level.FULL, beyond: tuple[SchedulePoint, ...] | None = None
    ) -> SchedulePoint:
        """The fastest that is found under a limit which a candidate keeps; the same when asked again."""
        key = limit, level, beyond
        if key not in self._known:
            best = self._found(self.pool, limit, level, beyond).under(limit)
            assert best is not None, "a candidate keeps the limit"
            self._known[key] = best
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, Level, tuple[SchedulePoint, ...] | None], SchedulePoint]:
        return {}

    @property
    def _places_moves(self) -> bool:
        """Whether moves are placed for each limit: the first search does, where the strategy makes none."""
        return self.judge.link is not None and bool(self.searches)

    @cached_property
    def _bound(self) -> SearchBound | None:
        """One for all searches of this frontier."""
        return None if self.effort is None else SearchBound(self.effort, self.plain.time, self.time_once)

    def least(self) -> SchedulePoint:
        """The point of least memory, as fast as searches make it, by which it may need a little less."""
        return self._least

    @cached_property
    def _least(self) -> SchedulePoint:
        """Uses only limit-independent candidates, so that the least memory does not depend on the limit.

        Finer exchanges gain time alone: of what is about as fast as they make it, the least memory.
        """
        if self._places_moves:
            return self._least_moved()
        limit, base = self.least_composed.needs, Pool(self.pool.base, self.pool.base)
        pools = dict.fromkeys([base, self._found(base, limit, Level.QUICK)])
        found = [point for each in pools for point in self._found(each, limit, Level.THOROUGH).points]
        fastest = min(each.time for each in found if each.needs <= limit)
        as_fast = [each for each in found if each.time <= fastest * (1 + WORTH[0])]
        return min(as_fast, key=lambda each: (each.needs, each.time))

    def _least_moved(self) -> SchedulePoint:
        """The least memory with all that waits moved, of candidates and of what is the least without."""
        from hybridremat.sequence.offload.search import least_limit

        least = replace(self, judge=replace(self.judge, link=None, host_limit=None)).least()
        every = Pool.of((least, *self.pool.base))
        limit = least_limit(self.judge, every.points)
        found = self._found(every, limit, Level.THOROUGH).under(limit)
        return least if found is None else found

    def searched(
        self, moments: tuple[Moment, ...], limit: int, bound: SearchBound | None
    ) -> SchedulePoint | None:
        """See :class:`GraphFrontier`."""
        judge = replace(self.judge, moments=moments, with_saved=False)
        points = [replace(each, needs=judge.needs_of(each.phases)) for each in self.candidates]
        goal = Goal(
            limit,
            max(each.needs for each in points),
            deadline=self.deadline,
            bound=bound,
            progress=self.progress,
        )
        best = search_all(self.searches, judge, Pool.of(points), goal).under(limit)
        return None if best is None else replace(best, needs=self.judge.needs_of(best.phases))

    def found_under(self, limit: int) -> tuple[SchedulePoint, ...]:
        """All that the searches for a limit leave which needs no more, by rising bytes."""
        return tuple(each for each in self._found(self.pool, limit).points if each.needs <= limit)

    def found_by(self, judge: Judge, limit: int) -> SchedulePoint | None:
        """The fastest that is quickly found under a limit by other times, which a judge of this graph has."""
        points = [replace(each, time=judge_of(judge, each).time(each.schedule)) for each in self.candidates]
        bound = None
        if self.effort is not None:
            bound = SearchBound(self.effort, self.plain.time, self.time_once)
        goal = Goal(limit, self.plain.peak, Level.QUICK, None, self.deadline, bound, self.progress)
        return search_all(self.searches, judge, Pool.of(points), goal).under(limit)

    def finished(self, point: SchedulePoint, limit: int) -> SchedulePoint:
        """See :class:`GraphFrontier`."""
        return self._found(Pool.of([point]), limit, Level.REST).under(limit) or point

    # --- the choice

    def choose(self, limit: int | None, max_overhead: float | None) -> SchedulePoint:
        """See :class:`GraphFrontier`."""
        self.require_policy_within(max_overhead)
        if limit is None:
            return self.fastest if max_overhead is None else self.smallest(max_overhead)
        chosen = self._under(limit)
        if self.is_within(chosen, max_overhead):
            return chosen
        assert max_overhead is not None
        smallest = self.smallest(max_overhead)
        if (needs := smallest.needs) > limit:
            raise too_slow(limit, max_overhead, takes=self.overhead(chosen), least=needs)
        return self.finished(smallest, limit)

    def _under(self, limit: int) -> SchedulePoint:
        """The fastest point that is found under a limit, or the one of least memory, if that is faster."""
        found = self._found(self.pool, limit).under(limit)
        if found is None:
            least = self.least()
            if least.needs > limit:
                raise self._infeasible(limit, least.needs)
            found = self._found(self.pool.with_points([least]), limit).under(limit) or least
        # with moves any limit down to the least is searched alike
        if self._places_moves or not self.searches or limit > AROUND_LEAST * self.least_composed.needs:
            return found
        return min(found, self.least(), key=lambda each: each.time)

    def _infeasible(self, limit: int, least: int) -> Exception:
        return infeasible(
            limit,
            least,
            self.plain.peak,
            self.outside,
            self.pins,
            workspace=max((each.workspace for each in self.graph.deliveries), default=0),
            searched=self.least_searched or self.curtailed,
            heaviest=heaviest_op(self.graph),
        )

    def smallest(self, max_overhead: float) -> SchedulePoint:
        """See :class:`GraphFrontier`.

        Searches make points of less memory fast enough: how far down, is found by bisection, and then step by
        step from there, since what they find at one limit does not tell all about the next.
        """
        self.require_policy_within(max_overhead)
        ordered = self.candidates
        high = next(n for n, each in enumerate(ordered) if self.is_within(each, max_overhead))
        found = self.best(ordered[high].needs, Level.THOROUGH)
        low = 0
        while low < high:
            middle = (low + high) // 2
            tried = self.best(ordered[middle].needs, Level.THOROUGH)
            if self.is_within(tried, max_overhead):
                found, high = tried, middle
            else:
                low = middle + 1
        failed = 0
        while high > 0 and failed < MOST_FAILURES:
            high -= 1
            tried = self.best(ordered[high].needs, Level.QUICK, (found,))
            fits = self.is_within(tried, max_overhead)
            found, failed = (tried, 0) if fits else (found, failed + 1)
        return found

    # --- figures

    def least_known(self, chosen: SchedulePoint) -> int:
        """See :class:`GraphFrontier`. What :meth:`least` searches for seconds may need less."""
        if self._places_moves:
            from hybridremat.sequence.offload.search import least_limit

            return min(chosen.needs, least_limit(self.judge, self.pool.base))
        return min(chosen.needs, self.least_composed.needs)

    def improved_at(self, numbers: Sequence[int], report: Callable[[int], None]) -> StepFrontier:
        """The frontier with what is found quickly at some of its candidates, by rising number.

        From the highest peak down: what was found there is tried at the next lower one as well.
        """
        least = self.least()  # as every plan says, wherever searches lead from elsewhere
        found: list[SchedulePoint] = []
        for done, number in enumerate(reversed([each for each in numbers if each])):
            report(done)
            found.append(self.best(self.candidates[number].needs, Level.QUICK, tuple(found[-1:])))
        every = [least, *(each for each in (*self.candidates, *found) if each.needs >= least.needs)]
        return replace(self, pool=Pool.of(every, self.pool.base))

    def points_beside(self, chosen: SchedulePoint) -> tuple[FrontierPoint, ...]:
        """See :class:`GraphFrontier`."""
        figures = {*self.points(), self.figures(chosen)}
        kept: list[FrontierPoint] = []
        for point in sorted(figures, key=lambda each: (each.peak, each.overhead)):
            if not kept or point.overhead < kept[-1].overhead:
                kept.append(point)
        return tuple(kept)

    @cached_property
    def _layers(self) -> Schedule | None:
        return layers_again(self.graph) if self.like is None else self.like._layers

    def checkpointed(self) -> FrontierPoint | None:
        """See :class:`GraphFrontier`."""
        if (schedule := self._layers) is None:
            return None
        plain = as_plain(self.graph)
        # a plain step has no deliveries: another graph, to be read anew
        judge = Judge(plain) if self.graph.deliveries else self.judge.without_outside(plain)
        point = judge(schedule)
        figures, known = self.figures(point), (*self.points(), self.figures(self.plain))
        return None if (figures.peak, figures.overhead) in {(p.peak, p.overhead) for p in known} else figures

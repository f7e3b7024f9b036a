"""The frontier of a step, and the choice of its point under a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from hybridremat.errors import PolicyError
from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import JointGraph, ops_by_parts
from hybridremat.planning.chain_plan import ChainPlan
from hybridremat.planning.effort import PlanningEffort, SearchBound
from hybridremat.planning.improvement import Improvement
from hybridremat.planning.limit_errors import infeasible, too_slow
from hybridremat.planning.progress import Progress, no_progress
from hybridremat.plans.records import FrontierPoint, PinRecord, SearchEffort
from hybridremat.sequence.bounds.certificate import MANY, heaviest_op, least_peak_bound, time_once
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import SchedulePoint, pareto_frontier
from hybridremat.sequence.strategies.layers import checkpointed_layers
from hybridremat.units import format_overhead_up

MOST_FAILURES: Final = 3
"""Limits in a row at which exchanges fail to be fast enough, after which no lower one is tried."""

AROUND_LEAST: Final = 1.15
"""Times the least memory: up to there a plan may be slower than what a thorough search at the least finds.
On 15 steps plans for so much took at least 2 % less."""


@dataclass(frozen=True)
class StepFrontier:
    """All schedules to choose from, before a limit is known.

    Attributes
    ----------
    judge
        What its schedules cost, and which are allowed.
    chains
        One for each block size.
    candidates
        The frontier, by rising peak and falling time; its last point is the plain step or better, or,
        where there are pins, the fastest step that obeys them.
    plain
        The plain step's figures.
    timings
        Seconds by stage.
    reused_options
        Whether some blocks have options of blocks with other sizes.
    pins
        What each pattern of a policy pins; every candidate obeys them.
    base
        The frontier of that part of the search which does not depend on the limit. The least memory is found
        from it alone, so that every plan of the step reports the same. Empty where nothing depends on it.
    exchanges
        Whether the schedule that is chosen is improved under its limit
        (:mod:`hybridremat.sequence.exchange`).
    under
        More candidates for a limit in bytes, of a strategy that looks for each limit anew.
    deadline
        When searches end with what they have.
    progress
        Called with (stage, done, total) by searches that take long.
    curtailed
        Whether blocks were left with fewer options than more work would find.
    effort
        What bounds the searches of a choice; None: caps of their own alone.
    """

    judge: Judge
    chains: tuple[ChainPlan, ...]
    candidates: tuple[SchedulePoint, ...]
    plain: SchedulePoint
    timings: dict[str, float] = field(compare=False)
    reused_options: bool = False
    pins: tuple[PinRecord, ...] = ()
    base: tuple[SchedulePoint, ...] = ()
    exchanges: bool = False
    under: Callable[[int], Sequence[SchedulePoint]] | None = field(default=None, compare=False)
    deadline: Deadline = field(default=NO_DEADLINE, compare=False)
    progress: Progress = field(default=no_progress, compare=False)
    curtailed: bool = False
    effort: PlanningEffort | None = field(default=None, compare=False)

    @property
    def graph(self) -> JointGraph:
        """The joint graph with costs."""
        return self.judge.graph

    @property
    def search_effort(self) -> SearchEffort | None:
        """What a plan records of the bound of its search."""
        if self.effort is None:
            return None
        return SearchEffort(self.effort.capture, self.effort.step, self.curtailed)

    def composed_under(self, limit: int | None) -> int | None:
        """Nanoseconds of the fastest candidate under a limit (bytes), or of all; None if none fits."""
        fitting = [each for each in self.candidates if limit is None or each.needs <= limit]
        return fitting[-1].time if fitting else None

    def gap_under(self, limit: int | None) -> float:
        """What could be won at most of that time, as a share of the plain step's; 0 where nothing fits."""
        time = self.composed_under(limit)
        return 0.0 if time is None else (time - self._time_once) / max(1, self.plain.time)

    @cached_property
    def _time_once(self) -> int:
        return time_once(self.graph)

    @property
    def searches(self) -> bool:
        """Whether a choice looks for more than the candidates, for a second or for many."""
        return self.exchanges or self.under is not None

    def least(self) -> SchedulePoint:
        """The point of least memory, as fast as exchanges make it, by which it may need a little less."""
        least = self._least_composed
        if not self.exchanges:
            return least
        limit, improvement = least.needs, self._least_improvement
        quick = improvement.quickly(least, limit)
        found = [improvement.under(start, limit) for start in (least, quick)]
        return min(found, key=lambda each: each.time)

    def proves_infeasible(self, limit: int) -> bool:
        """Whether it is proven that no schedule at all, found or not, fits into so many bytes."""
        good = self._least_composed.schedule
        return least_peak_bound(self.graph, good, MANY) > limit

    @property
    def least_composed_needs(self) -> int:
        """Bytes that blocks can be composed for. What :meth:`least` searches for seconds may need less."""
        return self._least_composed.needs

    @cached_property
    def _least_composed(self) -> SchedulePoint:
        """The point of least memory before exchanges; of several, the fastest."""
        return min(self.base or self.candidates, key=lambda c: (c.needs, c.time))

    def overhead(self, point: SchedulePoint) -> float:
        """Extra time as a fraction of the plain step's."""
        return point.time / self.plain.time - 1.0 if self.plain.time else 0.0

    def extra_flops(self, point: SchedulePoint) -> float:
        """Extra flops as a fraction of the plain step's."""
        return point.flops / self.plain.flops - 1.0 if self.plain.flops else 0.0

    @property
    def fastest_overhead(self) -> float:
        """The least overhead: 0 or less, unless a policy asks for recomputations."""
        return self.overhead(self.candidates[-1])

    def require_policy_within(self, max_overhead: float | None) -> None:
        """Raise PolicyError if what a policy wants recomputed alone exceeds an overhead (fraction)."""
        takes = self.fastest_overhead
        if max_overhead is not None and takes > max_overhead + 1e-12:
            raise PolicyError(
                f"policy: what it says must_recompute takes {format_overhead_up(takes)} more time than the "
                f"plain step, which is more than max_overhead {max_overhead:.1%}. Raise max_overhead, or "
                "recompute less."
            )

    def figures(self, point: SchedulePoint) -> FrontierPoint:
        """The figures of a schedule."""
        return FrontierPoint(point.peak, self.overhead(point), self.extra_flops(point))

    @property
    def plain_peak(self) -> int:
        """Bytes of the plain step."""
        return self.plain.peak

    def figures_at(self, limit: int | None, max_overhead: float | None) -> FrontierPoint:
        """The figures of the point that :meth:`choose` finds."""
        return self.figures(self.choose(limit, max_overhead))

    def points(self) -> tuple[FrontierPoint, ...]:
        """The figures of every candidate, by rising peak."""
        return tuple(self.figures(candidate) for candidate in self.candidates)

    def points_with(self, candidate: SchedulePoint) -> tuple[FrontierPoint, ...]:
        """The figures of every candidate, and of one that exchanges led to."""
        figures = {*self.points(), self.figures(candidate)}
        kept: list[FrontierPoint] = []
        for point in sorted(figures, key=lambda each: (each.peak, each.overhead)):
            if not kept or point.overhead < kept[-1].overhead:
                kept.append(point)
        return tuple(kept)

    def checkpointed(self) -> FrontierPoint | None:
        """Figures of checkpointing each layer; None without layers, and where the frontier has that point."""
        point = checkpointed_layers(self.graph)
        if point is None:
            return None
        figures, known = self.figures(point), (*self.points(), self.figures(self.plain))
        return None if (figures.peak, figures.overhead) in {(p.peak, p.overhead) for p in known} else figures

    def choose(
        self, limit: int | None, max_overhead: float | None
    ) -> SchedulePoint:
        """The fastest point under a limit (bytes), or the smallest within an overhead (fraction).

        The limit includes what the caller's code takes (:mod:`hybridremat.sequence.outside_memory`).

        Raises
        ------
        InfeasibleLimitError
            If no point satisfies both.
        PolicyError
            If what a policy wants recomputed alone exceeds the overhead.
        """
        self.require_policy_within(max_overhead)
        if limit is None:
            return self.candidates[-1] if max_overhead is None else self.smallest(max_overhead)
        fitting = [each for each in self._considered(limit) if each.needs <= limit]
        if not fitting:
            least = self.least()
            if (needs := least.needs) > limit:
                raise infeasible(
                    limit,
                    needs,
                    self.plain.peak,
                    self.judge.outside,
                    self.pins,
                    workspace=self._workspace,
                    searched=self.under is not None or self.curtailed,
                    heaviest=heaviest_op(self.graph),
                )
            fitting = [least]
        chosen = self._fastest(fitting[-1], limit)
        if max_overhead is not None and self.overhead(chosen) > max_overhead + 1e-12:
            smaller = self._small_enough(chosen, limit, max_overhead)
            chosen = self.polished(smaller, limit)
        return chosen

    def _fastest(self, fitting: SchedulePoint, limit: int) -> SchedulePoint:
        """The best that is found from the fastest candidate under a limit, or the one of least memory."""
        found = self.polished(self.improved(fitting, limit), limit)
        if not self.exchanges or limit > AROUND_LEAST * self.least_composed_needs:
            return found
        return min(found, self.least(), key=lambda each: each.time)

    def _small_enough(
        self, chosen: SchedulePoint, limit: int, max_overhead: float
    ) -> SchedulePoint:
        """The smallest point within an overhead, where the one ``chosen`` for a limit takes more."""
        smallest = self.smallest(max_overhead)
        if (needs := smallest.needs) <= limit:
            return smallest
        raise too_slow(limit, max_overhead, takes=self.overhead(chosen), least=needs)

    def _considered(self, limit: int) -> Sequence[SchedulePoint]:
        """The candidates for a limit, the slowest first; what is proved under it goes for all of them."""
        if self.under is None:
            return self.candidates
        found = self.under(limit)
        proven = found[0].least_time if found else None
        every = sorted((*self.candidates, *found), key=lambda each: -each.time)
        return [replace(each, least_time=proven) for each in every]

    def smallest(self, max_overhead: float) -> SchedulePoint:
        """The point of least memory within an overhead (a fraction).

        Exchanges make points of less memory fast enough: how far down, is found by bisection, and then step
        by step from there, since what they find at one limit does not tell all about the next.

        Raises
        ------
        PolicyError
            If what a policy wants recomputed alone exceeds the overhead.
        """
        self.require_policy_within(max_overhead)
        ordered = sorted(self.candidates, key=lambda c: (c.needs, c.time))
        high = next(n for n, c in enumerate(ordered) if self.overhead(c) <= max_overhead + 1e-12)
        found = self.improved(ordered[high], ordered[high].needs)
        low = 0
        while self.exchanges and low < high:
            middle = (low + high) // 2
            tried = self.improved(ordered[middle], ordered[middle].needs)
            if self.overhead(tried) <= max_overhead + 1e-12:
                found, high = tried, middle
            else:
                low = middle + 1
        failed = 0
        while self.exchanges and high > 0 and failed < MOST_FAILURES:
            high -= 1
            limit = ordered[high].needs
            tried = self._improvement.down_from(found, ordered[high], limit)
            fits = self.overhead(tried) <= max_overhead + 1e-12
            found, failed = (tried, 0) if fits else (found, failed + 1)
        return found

    def improved(self, candidate: SchedulePoint, limit: int) -> SchedulePoint:
        """A candidate after exchanges under a limit that it keeps; itself if they gain nothing."""
        return self._improvement.under(candidate, limit) if self.exchanges else candidate

    def polished(self, candidate: SchedulePoint, limit: int) -> SchedulePoint:
        """A candidate after searches under a limit that it keeps, as :meth:`improved`."""
        return self._improvement.polished(candidate, limit) if self.exchanges else candidate

    def improved_at(self, numbers: Sequence[int], report: Callable[[int], None]) -> StepFrontier:
        """The frontier with exchanges at some of its candidates, by rising number."""
        least = self.least()  # as every plan says, wherever exchanges lead from elsewhere
        found = self._improvement.along([self.candidates[n] for n in numbers if n], report)
        found = [least, *(c for c in (*self.candidates, *found) if c.needs >= least.needs)]
        improved = replace(self, candidates=pareto_frontier(found))
        improved._improvement.settle(improved.candidates)
        return improved

    @cached_property
    def _improvement(self) -> Improvement:
        return self._improvement_of(self.candidates)

    @cached_property
    def _least_improvement(self) -> Improvement:
        """Uses only limit-independent candidates, so that the least memory does not depend on the limit."""
        return self._improvement_of(self.base or self.candidates)

    def _improvement_of(self, candidates: Sequence[SchedulePoint]) -> Improvement:
        return Improvement(
            self.judge,
            candidates,
            self.plain.peak,
            self.deadline,
            self.progress,
            self._bound,
        )

    @cached_property
    def _bound(self) -> SearchBound | None:
        """One for all searches of this frontier."""
        if self.effort is None:
            return None
        return SearchBound(self.effort, self.plain.time, self._time_once)

    @property
    def _workspace(self) -> int:
        """Most bytes that whoever takes a gradient early allocates."""
        return max((each.workspace for each in self.graph.deliveries), default=0)

    def graph_of(self, candidate: SchedulePoint) -> JointGraph:
        """The graph with the ops run by parts that a candidate runs so."""
        return ops_by_parts(self.graph, candidate.parted)

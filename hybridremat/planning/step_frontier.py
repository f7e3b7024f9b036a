"""The frontier of a step, and the choice of its point under a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hybridremat.blocks.types import BlockBinding, OptionSet
from hybridremat.errors import InfeasibleLimitError, PolicyError
from hybridremat.graph.joint import JointGraph, Schedule, ops_by_parts
from hybridremat.graph.memory import StepMemory
from hybridremat.graph.pins import NO_PINS, Pins, obeys
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.plans.outside_memory import (
    NO_OUTSIDE_MEMORY,
    OutsideMemory,
    memory_needs,
    schedule_needs,
)
from hybridremat.plans.records import FrontierPoint, PinRecord
from hybridremat.sequence.exchange.edits import Edits
from hybridremat.sequence.exchange.search import Exchange, simulations_for
from hybridremat.sequence.frontier import SchedulePoint, pareto_frontier, schedule_point
from hybridremat.sequence.strategies.segments import checkpointed_blocks
from hybridremat.units import format_bytes, format_overhead_up, format_share_up

BEYOND: Final = 24
"""Candidates beyond a limit that exchanges try to bring under it."""

ABOVE: Final = (0.3, 0.1)
"""Higher limits from which exchanges come down to the limit: shares of the way to the plain step's peak."""

BEYOND_IN_A_FRONTIER: Final = 6
"""The same, where there are many limits."""

IN_A_FRONTIER: Final = 200
"""Simulated schedules for exchanges at one point, where there are many."""


@dataclass(frozen=True)
class ChainPlan:
    """One segmentation with the options of its blocks."""

    chain: Chain
    bindings: tuple[BlockBinding, ...]
    option_sets: tuple[OptionSet, ...]


@dataclass(frozen=True)
class Candidate:
    """One point of the frontier; ``chain_index`` is the chain of its decisions, None without any."""

    point: SchedulePoint
    chain_index: int | None


@dataclass(frozen=True)
class StepFrontier:
    """All schedules to choose from, before a limit is known.

    Attributes
    ----------
    graph
        The joint graph with costs.
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
    pinned
        What is pinned.
    exchanges
        Whether the schedule that is chosen is improved under its limit
        (:mod:`hybridremat.sequence.exchange`).
    """

    graph: JointGraph
    chains: tuple[ChainPlan, ...]
    candidates: tuple[Candidate, ...]
    plain: SchedulePoint
    timings: dict[str, float] = field(compare=False)
    reused_options: bool = False
    pins: tuple[PinRecord, ...] = ()
    pinned: Pins = NO_PINS
    exchanges: bool = False
    _exchanged: dict[tuple[Candidate, int, OutsideMemory], Candidate] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def least(self, outside: OutsideMemory) -> Candidate:
        """The point of least memory; of several, the fastest. Exchanges may let it need less, too."""
        least = min(self.candidates, key=lambda c: (self.needs(c, outside), c.point.time))
        return self.improved(least, self.needs(least, outside), outside)

    def overhead(self, point: SchedulePoint) -> float:
        """Extra time as a fraction of the plain step's."""
        return point.time / self.plain.time - 1.0 if self.plain.time else 0.0

    def extra_flops(self, point: SchedulePoint) -> float:
        """Extra flops as a fraction of the plain step's."""
        return point.flops / self.plain.flops - 1.0 if self.plain.flops else 0.0

    @property
    def fastest_overhead(self) -> float:
        """The least overhead: 0 or less, unless a policy asks for recomputations."""
        return self.overhead(self.candidates[-1].point)

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
        return self.figures(self.choose(limit, max_overhead).point)

    def points(self) -> tuple[FrontierPoint, ...]:
        """The figures of every candidate, by rising peak."""
        return tuple(self.figures(candidate.point) for candidate in self.candidates)

    def points_with(self, candidate: Candidate) -> tuple[FrontierPoint, ...]:
        """The figures of every candidate, and of one that exchanges led to."""
        figures = {*self.points(), self.figures(candidate.point)}
        kept: list[FrontierPoint] = []
        for point in sorted(figures, key=lambda each: (each.peak, each.overhead)):
            if not kept or point.overhead < kept[-1].overhead:
                kept.append(point)
        return tuple(kept)

    def checkpointed(self) -> FrontierPoint | None:
        """Figures of checkpointing each block, on the chain of fewest blocks; None without blocks."""
        chains = [plan for plan in self.chains if plan.chain.blocks]
        if not chains:
            return None
        plan = min(chains, key=lambda each: len(each.chain.blocks))
        return self.figures(checkpointed_blocks(plan.chain, plan.bindings, plan.option_sets))

    def choose(
        self,
        limit: int | None,
        max_overhead: float | None,
        outside: OutsideMemory = NO_OUTSIDE_MEMORY,
    ) -> Candidate:
        """The fastest point under a limit (bytes), or the smallest within an overhead (fraction).

        The limit includes what the caller's code takes (:mod:`hybridremat.plans.outside_memory`).

        Raises
        ------
        InfeasibleLimitError
            If no point satisfies both.
        PolicyError
            If what a policy wants recomputed alone exceeds the overhead.
        """
        self.require_policy_within(max_overhead)
        if limit is None:
            return self.candidates[-1] if max_overhead is None else self.smallest(max_overhead, outside)
        needed = [(self.needs(candidate, outside), candidate) for candidate in self.candidates]
        fitting = [candidate for needs, candidate in needed if needs <= limit]
        if not fitting:
            least = self.least(outside)
            if (needs := self.needs(least, outside)) > limit:
                raise infeasible(limit, needs, self.plain.peak, outside, self.pins, self._workspace)
            fitting = [least]
        chosen = self.improved(fitting[-1], limit, outside)
        if max_overhead is None or self.overhead(chosen.point) <= max_overhead + 1e-12:
            return chosen
        smallest = self.smallest(max_overhead, outside)
        if (needs := self.needs(smallest, outside)) <= limit:
            return smallest
        raise too_slow(limit, max_overhead, takes=self.overhead(chosen.point), least=needs)

    def smallest(self, max_overhead: float, outside: OutsideMemory) -> Candidate:
        """The point of least memory within an overhead (a fraction).

        Exchanges make points of less memory fast enough: how far down, is found by bisection.

        Raises
        ------
        PolicyError
            If what a policy wants recomputed alone exceeds the overhead.
        """
        self.require_policy_within(max_overhead)
        ordered = sorted(self.candidates, key=lambda c: (self.needs(c, outside), c.point.time))
        high = next(n for n, c in enumerate(ordered) if self.overhead(c.point) <= max_overhead + 1e-12)
        found = self.improved(ordered[high], self.needs(ordered[high], outside), outside)
        low = 0
        while self.exchanges and low < high:
            middle = (low + high) // 2
            tried = self.improved(ordered[middle], self.needs(ordered[middle], outside), outside)
            if self.overhead(tried.point) <= max_overhead + 1e-12:
                found, high = tried, middle
            else:
                low = middle + 1
        return found

    def improved(
        self,
        candidate: Candidate,
        limit: int,
        outside: OutsideMemory = NO_OUTSIDE_MEMORY,
        beyond: Sequence[Candidate] | None = None,
        simulations: int | None = None,
    ) -> Candidate:
        """A candidate after exchanges under a limit that it keeps; itself if they gain nothing.

        ``beyond``: candidates to begin with as well (default: the next ones of the frontier).
        ``simulations``: how many schedules are simulated (default: by their length).
        """
        if not self.exchanges or candidate.chain_index is None:
            return candidate
        key = candidate, limit, outside
        if key not in self._exchanged:
            graph = self.graph_of(candidate)

            def excess(schedule: Schedule, memory: StepMemory) -> int:
                needs = memory.peak if outside.none else memory_needs(graph, outside, schedule, memory)
                return needs - limit

            if beyond is None:
                above = self._from_above(candidate, limit, outside)
                beyond = [*above, *self._next(candidate, BEYOND)]
            starts = [candidate, *beyond]
            schedules = [each.point.schedule for each in starts]
            effort = simulations_for(schedules[0]) if simulations is None else simulations
            exchange = Exchange(
                graph, excess, lambda each: obeys(graph, each, self.pinned), Edits(graph), effort
            )
            schedule, origin = exchange(schedules[0], schedules[1:])
            found = candidate
            if schedule != candidate.point.schedule:
                found = self._made_of(candidate, starts[origin], graph, schedule)
            self._exchanged[key] = found
        return self._exchanged[key]

    def improved_at(self, numbers: Sequence[int], report: Callable[[int], None]) -> StepFrontier:
        """The frontier with exchanges at some of its candidates, by rising number.

        From the highest peak down: what was found there is tried at the next lower one as well.
        """
        least = self.least(NO_OUTSIDE_MEMORY)  # as every plan says, wherever exchanges lead from elsewhere
        found = list(self.candidates)
        last: list[Candidate] = []
        for done, number in enumerate(reversed(numbers)):
            report(done)
            candidate = self.candidates[number]
            limit = self.needs(candidate, NO_OUTSIDE_MEMORY)
            beyond = [*last, *self._next(candidate, BEYOND_IN_A_FRONTIER)]
            last = [self.improved(candidate, limit, beyond=beyond, simulations=IN_A_FRONTIER)]
            found += last
        found = [least, *(each for each in found if each.point.needs >= least.point.needs)]
        by_point = {id(each.point): each for each in found}
        points = pareto_frontier(each.point for each in found)
        improved = replace(self, candidates=tuple(by_point[id(point)] for point in points))
        for each in improved.candidates:  # a point is the plan of its own peak
            improved._exchanged[each, self.needs(each, NO_OUTSIDE_MEMORY), NO_OUTSIDE_MEMORY] = each
        return improved

    def _from_above(self, candidate: Candidate, limit: int, outside: OutsideMemory) -> list[Candidate]:
        """What exchanges lead to under some higher limits, each from the one before."""
        if candidate not in self.candidates:
            return []
        place = self.candidates.index(candidate)
        last: list[Candidate] = []
        for share in ABOVE:
            higher = limit + int(share * (self.plain.peak - limit))
            fitting = [c for c in self.candidates[place:] if self.needs(c, outside) <= higher]
            if not fitting or fitting[-1] is candidate:
                continue
            beyond = [*last, *self._next(fitting[-1], BEYOND_IN_A_FRONTIER)]
            last = [self.improved(fitting[-1], higher, outside, beyond, IN_A_FRONTIER)]
        return last

    def _next(self, candidate: Candidate, count: int) -> Sequence[Candidate]:
        """The ``count`` candidates that are a little faster, and need a little more."""
        if candidate not in self.candidates:
            return ()
        place = self.candidates.index(candidate)
        return [each for each in self.candidates[place + 1 :][:count] if each.chain_index is not None]

    def _made_of(
        self, start: Candidate, origin: Candidate, graph: JointGraph, schedule: Schedule
    ) -> Candidate:
        """The candidate of a schedule that exchanges led to from ``origin``, in place of ``start``."""
        if not origin.point.decisions:  # the plain step, or repaired from it
            origin = start
        composed = start.point
        point = schedule_point(graph, schedule, origin.point.decisions)
        composed_time = composed.time if composed.composed_time is None else composed.composed_time
        point = replace(point, parted=composed.parted, composed_time=composed_time)
        return Candidate(point, origin.chain_index)

    def needs(self, candidate: Candidate, outside: OutsideMemory) -> int:
        """Bytes of the step at a point, outside memory included."""
        point = candidate.point
        if outside.none:
            return point.peak
        return schedule_needs(self.graph_of(candidate), point.schedule, outside)

    @property
    def _workspace(self) -> int:
        """Most bytes that whoever takes a gradient early allocates."""
        return max((each.workspace for each in self.graph.deliveries), default=0)

    def graph_of(self, candidate: Candidate) -> JointGraph:
        """The graph with the ops run by parts that a candidate runs so."""
        return ops_by_parts(self.graph, candidate.point.parted)


def infeasible(
    limit: int,
    least: int,
    plain_peak: int,
    outside: OutsideMemory,
    pins: Sequence[PinRecord],
    workspace: int = 0,
) -> InfeasibleLimitError:
    """The error for a limit below the ``least`` feasible one (bytes).

    ``workspace``: what an optimizer in the backward takes at most.
    """
    share = format_share_up(least, plain_peak)
    under = f" under policy= ({', '.join(pin.pattern for pin in pins)})" if pins else ""
    less = ", pin less" if pins else ""
    kept = f", {format_bytes(outside.reserve)} of it kept free by reserve=" if outside.reserve else ""
    if outside.forwards > 1:
        kept += f", for {outside.forwards} forwards at a time"
    early = ""
    if workspace:
        early = (
            f" The optimizer that steps in the backward takes up to {format_bytes(workspace)} of it "
            '(fused=True takes less), which the plain step does not count; gradients="at_end" leaves it out.'
        )
    return InfeasibleLimitError(
        f"no plan fits memory_limit {format_bytes(limit)} ({limit} bytes{kept}): "
        f"the least feasible limit for this model and input{under} is {format_bytes(least)} "
        f"({least} bytes, {share} of the plain step's {format_bytes(plain_peak)}). "
        f"Raise the limit to that, make the batch or the input smaller{less}, or pass "
        f'on_infeasible="least" to run the plan of least memory.{early}',
        limit=limit,
        least=least,
    )


def too_slow(limit: int, max_overhead: float, *, takes: float, least: int) -> InfeasibleLimitError:
    """The error for a feasible limit that no plan keeps within an overhead.

    ``takes`` is the overhead of the fastest plan under the limit, and ``least`` the least feasible limit
    (bytes) within ``max_overhead``.
    """
    return InfeasibleLimitError(
        f"no plan keeps both memory_limit {format_bytes(limit)} and max_overhead {max_overhead:.1%}: "
        f"the fastest plan under that limit takes {format_overhead_up(takes)} more time, and the least limit "
        f"with that overhead is {format_bytes(least)} ({least} bytes). Raise one of the two, or give only "
        "one.",
        limit=limit,
        least=least,
    )

"""The frontier of a step, and the choice of its point under a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridremat.blocks.types import BlockBinding, OptionSet
from hybridremat.errors import InfeasibleLimitError, PolicyError
from hybridremat.graph.joint import JointGraph, ops_by_parts
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.plans.outside_memory import NO_OUTSIDE_MEMORY, OutsideMemory, schedule_needs
from hybridremat.plans.records import FrontierPoint, PinRecord
from hybridremat.sequence.frontier import SchedulePoint
from hybridremat.sequence.strategies.segments import checkpointed_blocks
from hybridremat.units import format_bytes, format_overhead_up, format_share_up


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
    """

    graph: JointGraph
    chains: tuple[ChainPlan, ...]
    candidates: tuple[Candidate, ...]
    plain: SchedulePoint
    timings: dict[str, float] = field(compare=False)
    reused_options: bool = False
    pins: tuple[PinRecord, ...] = ()

    def least(self, outside: OutsideMemory) -> Candidate:
        """The point of least memory; of several, the fastest."""
        return min(self.candidates, key=lambda c: (self.needs(c, outside), c.point.time))

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
        needed = [(self.needs(candidate, outside), candidate) for candidate in self.candidates]
        fitting = [c for needs, c in needed if limit is None or needs <= limit]
        if not fitting:
            assert limit is not None
            least = min(needs for needs, _ in needed)
            raise infeasible(limit, least, self.plain.peak, outside, self.pins, self._workspace)
        if max_overhead is None:
            return fitting[-1]
        within = [c for c in fitting if self.overhead(c.point) <= max_overhead + 1e-12]
        if not within:
            assert limit is not None
            least = min(needs for needs, c in needed if self.overhead(c.point) <= max_overhead)
            raise too_slow(limit, max_overhead, takes=self.overhead(fitting[-1].point), least=least)
        return within[-1] if limit is not None else within[0]

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

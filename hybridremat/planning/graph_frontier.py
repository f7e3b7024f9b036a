"""What a choice needs to know of the frontier of one graph, whether it runs op by op or compiled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from hybridremat.errors import PolicyError
from hybridremat.graph.joint import JointGraph, ops_by_parts
from hybridremat.planning.chain_plan import ChainPlan
from hybridremat.planning.progress import Progress, Timings
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import FrontierPoint, PinRecord, SearchEffort
from hybridremat.sequence.effort import PlanningEffort, SearchBound
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.outside_memory import Moment, OutsideMemory
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.units import format_overhead_up


@dataclass(frozen=True)
class CountedGraph:
    """What was found of one graph without a limit, by the count of its values.

    Attributes
    ----------
    judge
        What its schedules cost, and which are allowed.
    chains
        One for each block size.
    pool
        What was found: the last point is the plain step or better, or, where there are pins, the fastest step
        that obeys them. The least memory is found from the pool's base alone.
    plain
        The plain step.
    timings
        Seconds by stage.
    reused_options
        Whether some blocks have options of blocks with other sizes.
    pins
        What each pattern of a policy pins; every point obeys them.
    curtailed
        Whether blocks were left with fewer options than more work would find.
    effort
        What bounds the searches of a choice; None: caps of their own alone.
    """

    judge: Judge
    chains: tuple[ChainPlan, ...]
    pool: Pool
    plain: SchedulePoint
    timings: Timings = field(compare=False)
    reused_options: bool = False
    pins: tuple[PinRecord, ...] = ()
    curtailed: bool = False
    effort: PlanningEffort | None = field(default=None, compare=False)

    @property
    def candidates(self) -> tuple[SchedulePoint, ...]:
        """The points of the pool, by rising bytes."""
        return self.pool.points

    @property
    def search_effort(self) -> SearchEffort | None:
        """What a plan records of the bound of its search."""
        if self.effort is None:
            return None
        return SearchEffort(self.effort.capture, self.effort.step, self.curtailed)


class GraphFrontier(ABC):
    """The schedules of one graph to choose from, before a limit is known.

    Attributes
    ----------
    counted
        The frontier by the count of its graph's values.
    plain
        The plain step.
    reused_options
        Whether some blocks have options of blocks with other sizes.
    choosing
        The stage that a choice belongs to; empty where it takes no time.
    """

    counted: CountedGraph
    plain: SchedulePoint
    reused_options: bool
    choosing: str = ""

    @property
    def graph(self) -> JointGraph:
        """The joint graph with costs."""
        return self.counted.judge.graph

    @property
    def outside(self) -> OutsideMemory:
        """What is alive around the step."""
        return self.counted.judge.outside

    @property
    def fastest(self) -> SchedulePoint:
        """The point of least time, before anything is searched."""
        return min(self.counted.candidates, key=lambda each: (each.time, each.needs))

    @abstractmethod
    def choose(self, limit: int | None, max_overhead: float | None) -> SchedulePoint:
        """The fastest point under a limit (bytes), or the smallest within an overhead (fraction).

        The limit includes what the caller's code takes (:mod:`hybridremat.sequence.outside_memory`).

        Raises
        ------
        InfeasibleLimitError
            If no point satisfies both.
        PolicyError
            If what a policy wants recomputed alone exceeds the overhead.
        """

    @abstractmethod
    def least(self) -> SchedulePoint:
        """The point of least memory."""

    @abstractmethod
    def smallest(self, max_overhead: float) -> SchedulePoint:
        """The point of least memory within an overhead (a fraction).

        Raises
        ------
        PolicyError
            If what a policy wants recomputed alone exceeds the overhead.
        """

    @abstractmethod
    def offered(self) -> Sequence[SchedulePoint]:
        """The points that are there without a limit, by rising bytes."""

    @abstractmethod
    def least_known(self, chosen: SchedulePoint) -> int:
        """Least bytes of a plan, as one that runs as ``chosen`` reports them."""

    @abstractmethod
    def as_planned(self, plan: PlanData) -> SchedulePoint:
        """The point that a plan of the same graph is, with the bytes that it has here."""

    @abstractmethod
    def points_beside(self, chosen: SchedulePoint) -> tuple[FrontierPoint, ...]:
        """The figures of what a plan was chosen from, its own among them, by rising peak."""

    def graph_of(self, point: SchedulePoint) -> JointGraph:
        """The joint graph with the ops run by parts that a point runs so."""
        return ops_by_parts(self.graph, point.parted)

    def finished(self, point: SchedulePoint, limit: int) -> SchedulePoint:
        """A thoroughly searched point after the other searches of a plan, under a limit that it keeps."""
        del limit
        return point

    def searched(
        self, moments: tuple[Moment, ...], limit: int, bound: SearchBound | None
    ) -> SchedulePoint | None:
        """The fastest schedule under a limit of a whole step, of which this is one graph; None if none fits.

        ``bound``: what searches may spend; None: caps of their own.
        """
        del moments, limit, bound
        return None

    def shown_by(self, progress: Progress) -> Self:
        """The frontier for a choice whose progress is shown."""
        del progress
        return self

    def proves_infeasible(self, limit: int) -> bool:
        """Whether it is proven that no schedule at all, found or not, fits into so many bytes."""
        del limit
        return False

    def checkpointed(self) -> FrontierPoint | None:
        """Figures of checkpointing each layer; None without layers, and where the frontier has that point."""
        return None

    @property
    def plain_peak(self) -> int:
        """Bytes of the plain step."""
        return self.plain.peak

    def least_needs(self, max_overhead: float | None) -> int:
        """Least bytes of a plan within an overhead (a fraction; None: any)."""
        return (self.least() if max_overhead is None else self.smallest(max_overhead)).needs

    def overhead(self, point: SchedulePoint) -> float:
        """Extra time as a fraction of the plain step's."""
        return point.time / self.plain.time - 1.0 if self.plain.time else 0.0

    def extra_flops(self, point: SchedulePoint) -> float:
        """Extra flops as a fraction of the plain step's."""
        return point.flops / self.plain.flops - 1.0 if self.plain.flops else 0.0

    def figures(self, point: SchedulePoint) -> FrontierPoint:
        """The figures of a schedule."""
        return FrontierPoint(point.peak, self.overhead(point), self.extra_flops(point))

    def figures_at(self, limit: int | None, max_overhead: float | None) -> FrontierPoint:
        """The figures of the point that :meth:`choose` finds."""
        return self.figures(self.choose(limit, max_overhead))

    def points(self) -> tuple[FrontierPoint, ...]:
        """The figures of what is offered."""
        return tuple(map(self.figures, self.offered()))

    @property
    def fastest_overhead(self) -> float:
        """The least overhead: 0 or less, unless a policy asks for recomputations."""
        return self.overhead(self.fastest)

    def is_within(self, point: SchedulePoint, max_overhead: float | None) -> bool:
        """Whether a point takes no more time than an overhead (a fraction) allows."""
        return max_overhead is None or self.overhead(point) <= max_overhead + 1e-12

    def require_policy_within(self, max_overhead: float | None) -> None:
        """Raise PolicyError if what a policy wants recomputed alone exceeds an overhead (fraction)."""
        if not self.is_within(self.fastest, max_overhead):
            raise PolicyError(
                "policy: what it says must_recompute takes "
                f"{format_overhead_up(self.fastest_overhead)} more time than the plain step, which is more "
                f"than max_overhead {max_overhead:.1%}. Raise max_overhead, or recompute less."
            )

"""A plan as plain data: schedule, figures, and the decisions block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from hybridremat.graph.joint import Schedule
from hybridremat.plans.coverage import Coverage
from hybridremat.plans.origin import Origin
from hybridremat.plans.records import (
    Certificate,
    GraphBreak,
    PinRecord,
    PlanDetails,
    PlannedBlock,
    SearchEffort,
    StepComposition,
    TuningRecord,
)
from hybridremat.plans.request import Request
from hybridremat.plans.sizes import SizeRow


@dataclass(frozen=True)
class PlanData:
    """The fields of a plan, documented at :class:`hybridremat.Plan`."""

    memory_limit: int | None
    asked_limit: int | None
    predicted_peak: int
    needed: int
    plain_peak: int
    least_peak: int
    overhead: float
    extra_flops: float
    saved_bytes: int
    blocks: tuple[PlannedBlock, ...]
    cost_model: str
    fingerprint: str
    schedule: Schedule
    reused_options: bool = False
    parts: tuple[PlanData, ...] = ()
    places: tuple[int, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    composition: StepComposition | None = None
    pins: tuple[PinRecord, ...] = ()
    origin: Origin = field(default_factory=Origin)
    request: Request = field(default_factory=Request)
    details: PlanDetails | None = None
    lean: bool = False
    plain_code: bool = False
    composed_overhead: float | None = None
    strategy_gap: float | None = None
    certificate: Certificate | None = None
    untried: tuple[str, ...] = ()
    host_bytes: int = 0
    search: SearchEffort | None = field(default=None, compare=False)
    timings: dict[str, float] = field(compare=False, default_factory=dict)
    tuning: TuningRecord | None = field(default=None, compare=False)
    coverage: Coverage | None = field(default=None, compare=False, repr=False)
    others: OtherSizes | None = field(default=None, compare=False, repr=False)

    @property
    def reserve(self) -> int:
        """Bytes of the limit kept free, once the forward is over, for the caller's own code."""
        return self.request.reserve_bytes()

    @property
    def forwards(self) -> int:
        """How many forwards may wait for their backward at one time."""
        return self.request.forwards

    @property
    def compiler(self) -> str:
        """``"eager"`` or ``"inductor"``.

        With Inductor, all peaks but those of blocks and ``details`` are of its generated code; those are of
        the graph with its fused values left out.
        """
        return self.request.compiler

    @property
    def planning_seconds(self) -> float:
        """Seconds that planning took in all, without compiling."""
        return sum(seconds for stage, seconds in self.timings.items() if stage != "compile")

    @property
    def lower_bound(self) -> int | None:
        """Nanoseconds that no schedule under the limit beats, by the cost model; None if not certified."""
        return None if self.certificate is None else self.certificate.lower_bound

    @property
    def optimality_gap(self) -> float | None:
        """The most that a better schedule could save, as a fraction of the time; None if not certified."""
        return None if self.certificate is None else self.certificate.gap

    def figures(self) -> Self:
        """The same plan without what it was chosen from, and block by block: some kilobytes."""
        return replace(self, details=None, blocks=())

    def size_rows(self) -> Sequence[SizeRow]:
        """The step at all sizes that were planned from its capture, in order."""
        if self.others is not None:
            return self.others.known()
        return () if self.coverage is None else self.coverage.rows

    def covering(self) -> Self:
        """The same plan with what is known of its other sizes by now (:attr:`coverage`)."""
        if self.others is None or self.details is None:
            return self
        return replace(self, coverage=self.others.coverage(self))

    def with_timings(self, timings: dict[str, float]) -> Self:
        """The same plan with more stages timed."""
        return replace(self, timings={**self.timings, **timings})


def row_of(plan: PlanData, sizes: Mapping[str, int]) -> SizeRow:
    """A plan as the row of its sizes."""
    return SizeRow(sizes, plan.memory_limit, plan.plain_peak, plan.needed, plan.overhead)


class OtherSizes(Protocol):
    """The capture that a plan is of, at all sizes."""

    @property
    def own(self) -> Mapping[str, int]:
        """By name, the sizes that may differ, and what they are here."""
        ...

    def plan(self, sizes: Mapping[str, int]) -> PlanData:
        """The plan at other sizes. Raises as :meth:`hybridremat.Plan.at`."""
        ...

    def rows(self, every: Sequence[Mapping[str, int]]) -> Sequence[SizeRow]:
        """The step at many sizes, also where nothing fits. Raises as :meth:`plan` else."""
        ...

    def known(self) -> Sequence[SizeRow]:
        """All sizes that have been planned, in order."""
        ...

    def coverage(self, plan: PlanData) -> Coverage | None:
        """What is known of the sizes by now, for the file of a plan at its own; None if that is nothing."""
        ...

"""A plan as plain data: schedule, figures, and the decisions block by block."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from hybridremat.graph.joint import Schedule
from hybridremat.plans.origin import Origin
from hybridremat.plans.records import GraphBreak, PinRecord, PlanDetails, PlannedBlock, Request


@dataclass(frozen=True)
class PlanData:
    """A plan for one model, input and limit.

    Attributes
    ----------
    memory_limit
        Bytes of step memory that the plan promises to stay under; None if only an overhead was asked.
    asked_limit
        Bytes that were asked for: more than nothing fits, and ``memory_limit`` is what the least plan needs,
        if ``on_infeasible="least"``; else the same as ``memory_limit``.
    reserve
        Bytes of the limit kept free, once the forward is over, for the caller's own code.
    forwards
        How many forwards may wait for their backward at one time.
    predicted_peak
        Exact step memory of the emitted graphs in bytes, without the caller's own code.
    needed
        Bytes that the step takes at most with the caller's code and further forwards
        (:mod:`hybridremat.plans.outside_memory`); the same as ``predicted_peak`` without.
    plain_peak, least_peak
        Bytes: the plain step's, and the least ``memory_limit`` that is feasible with ``reserve`` and
        ``forwards``.
    overhead, extra_flops
        Fractions of the plain step's time (by the cost model) and flops.
    saved_bytes
        Bytes alive between forward and backward.
    blocks
        Decisions, block by block.
    parts
        For a step of several graphs, the plan of each distinct one; ``schedule`` is then empty.
    breaks
        The graph breaks between them, in the order of the forward.
    pins
        What each pattern of ``policy=`` pins.
    timings
        Seconds that planning took, by stage.
    cost_model
        The source of times.
    reused_options
        Whether some blocks' options were those of another input shape, counted anew for this one: quick to
        make, exact in memory, and perhaps a little slower than a plan of its own.
    fingerprint
        Identifies the joint graph: ops, edges, shapes, dtypes, strides.
    schedule
        Every op execution, recomputations included.
    origin, request
        What the plan was made for and where, and what was asked.
    details
        What it was chosen from; None for a step of several graphs (each of ``parts`` has its own) and for a
        graph without a backward.
    """

    memory_limit: int | None
    asked_limit: int | None
    reserve: int
    forwards: int
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
    breaks: tuple[GraphBreak, ...] = ()
    pins: tuple[PinRecord, ...] = ()
    origin: Origin = field(default_factory=Origin)
    request: Request = field(default_factory=Request)
    details: PlanDetails | None = None
    timings: dict[str, float] = field(compare=False, default_factory=dict)

    @property
    def planning_seconds(self) -> float:
        """Seconds that planning took in all."""
        return sum(self.timings.values())

    def with_timings(self, timings: dict[str, float]) -> Self:
        """The same plan with more stages timed."""
        return replace(self, timings={**self.timings, **timings})

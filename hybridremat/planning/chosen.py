"""What a step is emitted from: its schedule, and what has to hold of the emitted graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.graph.joint import Schedule
from hybridremat.graph.tracing.trace import TracedStep

if TYPE_CHECKING:
    from hybridremat.compiler.offload.stores import Stores


@dataclass(frozen=True)
class Chosen:
    """The schedule of a traced step.

    Attributes
    ----------
    step
        The step with costs.
    schedule
        Every execution of its ops.
    limit
        Most bytes of the emitted graphs.
    accept
        Raises :class:`~hybridremat.PlanError` if their memory is not what was planned.
    started
        Called when the forward starts.
    accept_code
        As ``accept``, for the code that a compiler generates of the graphs; None if they run op by op.
    lean
        Whether the compiler keeps the order of the schedule and frees every buffer at once.
    plain
        Whether it lays out what is saved as in a step without a plan.
    stores
        Where what moves waits; None if nothing does.
    """

    step: TracedStep
    schedule: Schedule
    limit: int | None = None
    accept: Callable[[EmittedMemory], None] = lambda _: None
    started: Callable[[], None] = lambda: None
    accept_code: Callable[[EmittedMemory], None] | None = None
    lean: bool = False
    plain: bool = False
    stores: Stores | None = None


Choose = Callable[[TracedStep], Chosen]

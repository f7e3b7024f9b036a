"""A planned step as a sequence of allocations and frees, with what each belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridremat.errors import PlotError
from hybridremat.plans.plan_data import PlanData
from hybridremat.reports.spans import Span
from hybridremat.reports.timeline import StepTimeline, step_timeline


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Bytes that are allocated, or freed (``alloc`` false), at an execution.

    ``key`` joins the two events of one allocation; ``span`` is None for the workspace of a kernel.
    """

    alloc: bool
    key: int
    size: int
    execution: int
    span: Span | None


def require_timeline(plan: PlanData) -> StepTimeline:
    """The timeline of a plan's step.

    Raises
    ------
    PlotError
        If the step is several graphs, or has no backward: there is then no one sequence of operations.
    """
    if plan.details is None or not plan.schedule.steps:
        what = "is several graphs" if plan.parts else "has no backward"
        raise PlotError(
            f"this step {what}, so that there is no one sequence of operations to be written; "
            "plan.to_html shows such a plan, graph by graph"
        )
    return step_timeline(plan.details.chain, plan.schedule)


def memory_events(timeline: StepTimeline) -> Iterator[MemoryEvent]:
    """All allocations and frees in order: outputs, then workspace, which goes first.

    The bytes that are alive once the allocations of an execution are over are those of
    :meth:`StepTimeline.totals`. What stays to the end of the step has no free.
    """
    count = len(timeline.temporary)
    born: list[list[int]] = [[] for _ in range(count)]
    dying: list[list[int]] = [[] for _ in range(count)]
    for key, span in enumerate(timeline.spans):
        if span.size and span.birth <= span.death:
            born[span.birth].append(key)
            dying[span.death].append(key)
    for now, temporary in enumerate(timeline.temporary):
        workspace = MemoryEvent(True, len(timeline.spans) + now, temporary, now, None)
        yield from (_event(timeline, key, now, alloc=True) for key in born[now])
        if temporary:
            yield workspace
            yield MemoryEvent(False, workspace.key, temporary, now, None)
        if now < count - 1:
            yield from (_event(timeline, key, now, alloc=False) for key in dying[now])


def _event(timeline: StepTimeline, key: int, now: int, *, alloc: bool) -> MemoryEvent:
    span = timeline.spans[key]
    return MemoryEvent(alloc, key, span.size, now, span)


def place(source: str) -> tuple[str, int]:
    """File and line of a source ``file:line``; an empty name and 0 if it is not known."""
    file, _, line = source.rpartition(":")
    return (file, int(line)) if line.isdigit() else (source, 0)


def role(timeline: StepTimeline, execution: int) -> str:
    """What an execution is to the step: ``forward of block 2``, ``recomputed for block 2``."""
    again = timeline.recomputed[execution]
    phase = "forward" if execution < timeline.schedule.num_forward else "backward"
    block = timeline.blocks[execution]
    return f"{'recomputed in the ' if again else ''}{phase}{'' if block is None else f' of block {block}'}"

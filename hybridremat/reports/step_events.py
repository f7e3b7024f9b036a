"""A planned step as a sequence of allocations and frees, with what each belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridremat.reports.timeline import StepTimeline
from hybridremat.reports.whole_step import Holding, WholeStep


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Bytes that are allocated, or freed (``alloc`` false), at an execution.

    ``key`` joins the two events of one allocation; ``held`` is None for the workspace of a kernel, and for
    all that a section takes which is one execution.
    """

    alloc: bool
    key: int
    size: int
    execution: int
    held: Holding | None


def memory_events(step: WholeStep) -> Iterator[MemoryEvent]:
    """All allocations and frees in order: outputs, then workspace, which goes first.

    The bytes that are alive once the allocations of an execution are over are those of
    :meth:`WholeStep.totals`. What stays to the end of the step has no free.
    """
    count = len(step.temporary)
    born: list[list[int]] = [[] for _ in range(count)]
    dying: list[list[int]] = [[] for _ in range(count)]
    for key, held in enumerate(step.holdings):
        if held.size and held.birth <= held.death:
            born[held.birth].append(key)
            dying[held.death].append(key)
    for now, temporary in enumerate(step.temporary):
        workspace = MemoryEvent(True, len(step.holdings) + now, temporary, now, None)
        yield from (_event(step, key, now, alloc=True) for key in born[now])
        if temporary:
            yield workspace
            yield MemoryEvent(False, workspace.key, temporary, now, None)
        if now < count - 1:
            yield from (_event(step, key, now, alloc=False) for key in dying[now])


def _event(step: WholeStep, key: int, now: int, *, alloc: bool) -> MemoryEvent:
    held = step.holdings[key]
    return MemoryEvent(alloc, key, held.size, now, held)


def place(source: str) -> tuple[str, int]:
    """File and line of a source ``file:line``; an empty name and 0 if it is not known."""
    file, _, line = source.rpartition(":")
    return (file, int(line)) if line.isdigit() else (source, 0)


def role(step: WholeStep, execution: int) -> str:
    """What an execution is to the step: ``forward of block 2``, ``recomputed for block 2``, and where."""
    at = step.executions[execution]
    timeline, name = step.timelines[at.section], step.names[at.section]
    if timeline is None or at.local is None:
        found = "forward" if at.forward else "backward"
    else:
        found = _role_in_graph(timeline, at.local)
    return ", ".join(filter(None, (found, name)))


def _role_in_graph(timeline: StepTimeline, execution: int) -> str:
    again = timeline.recomputed[execution]
    phase = "forward" if execution < timeline.schedule.num_forward else "backward"
    block = timeline.blocks[execution]
    return f"{'recomputed in the ' if again else ''}{phase}{'' if block is None else f' of block {block}'}"

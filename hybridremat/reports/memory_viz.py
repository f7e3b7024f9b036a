"""A plan as a snapshot of PyTorch's allocator, for its viewer and ``torch.cuda._memory_viz``.

The format is that of ``torch.cuda.memory._dump_snapshot``: a pickle of plain lists, dicts, numbers and text.
Addresses are those of an allocator that takes the first gap that fits: sizes and order are the plan's,
addresses are not those of any run.
"""

from __future__ import annotations

import pickle
from bisect import insort
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridremat.files import write_atomic
from hybridremat.plans.plan_data import PlanData
from hybridremat.reports.step_events import MemoryEvent, memory_events, place, role
from hybridremat.reports.whole_step import BETWEEN, WholeStep, whole_step

BASE = 0x7F0000000000
"""Address of the one segment; viewers take 0 for none."""


class FirstFit:
    """Addresses of what is alive, each at the first gap that is large enough."""

    def __init__(self) -> None:
        self.live: list[tuple[int, int, int]] = []  # (start, size, key), by address
        self.end = 0

    def take(self, size: int, key: int) -> int:
        """The offset of a new allocation."""
        start = 0
        for taken, length, _ in self.live:
            if taken - start >= size:
                break
            start = taken + length
        insort(self.live, (start, size, key))
        self.end = max(self.end, start + size)
        return start


def write_memory_viz(plan: PlanData, path: str | Path) -> None:
    """Write the snapshot of a plan; the file appears complete or not at all.

    Raises
    ------
    PlotError
        If the step is several graphs that are compiled, or has no backward.
    OutputError
        If it cannot be written.
    """
    write_atomic(Path(path), pickle.dumps(snapshot(plan), protocol=4))


def snapshot(plan: PlanData) -> dict[str, Any]:
    """The snapshot of a plan as plain data: one segment, and the trace of one device."""
    step, places = whole_step(plan), FirstFit()
    frames: dict[int, list[dict[str, Any]]] = {}
    events = list(_trace(step, places, frames))
    total = max(1, places.end)
    alive = sum(size for _, size, _ in places.live)
    segment = {
        "device": 0, "address": BASE, "total_size": total, "allocated_size": alive, "active_size": alive,
        "requested_size": alive, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": list(_blocks(places, total, frames)),
    }  # fmt: skip
    opening = {"action": "segment_alloc", "addr": BASE, "size": total, "stream": 0, "time_us": 0}
    traces = [[{**opening, "frames": []}, *events]]
    return {"segments": [segment], "device_traces": traces, "external_annotations": []}


def _trace(
    step: WholeStep, places: FirstFit, frames: dict[int, list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    offsets: dict[int, int] = {}
    starts = [start // 1000 for start in step.starts()]
    for event in memory_events(step):
        key, size = event.key, event.size
        if event.alloc:
            offsets[key] = places.take(size, key)
            frames[key] = _frames(step, event)
        else:
            places.live.remove((offsets[key], size, key))
        common = {
            "addr": BASE + offsets[key], "size": size, "stream": 0, "frames": frames[key],
            "time_us": starts[event.execution],
        }  # fmt: skip
        for action in ("alloc",) if event.alloc else ("free_requested", "free_completed"):
            yield {"action": action, **common}


def _frames(step: WholeStep, event: MemoryEvent) -> list[dict[str, Any]]:
    """Innermost first: the value and its op at the model's line, the module, what it is to the step."""
    at, held = step.executions[event.execution], event.held
    timeline = step.timelines[at.section]
    if held is not None and held.section is None:
        return [{"name": f"held {BETWEEN}", "filename": "", "line": 0}]
    what_runs = role(step, event.execution)
    if timeline is None or at.local is None:
        return [{"name": what_runs, "filename": "", "line": 0}]
    span, graph = None if held is None else held.span, timeline.graph
    op = graph.ops[timeline.schedule.steps[at.local]]
    what = "workspace of " if span is None else "generator state of " if span.value is None else ""
    name = f"{what}{op.target or op.name}"
    if span is not None and span.op is None and span.value is not None:
        name = f"gradient that arrives: {graph.values[span.value].name}"
    elif span is not None and span.value is not None:
        name += f" → {graph.values[span.value].name}"
    file, line = place(op.source)
    names = (name, op.module or "(no module)", what_runs)
    return [{"name": each, "filename": file, "line": line} for each in names]


def _blocks(
    places: FirstFit, total: int, frames: dict[int, list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """What is alive at the end of the step, and the gaps between, in the order of addresses."""
    at = 0
    for start, size, key in places.live:
        if start > at:
            yield _block(at, start - at, "inactive", [])
        yield _block(start, size, "active_allocated", frames[key])
        at = start + size
    if at < total:
        yield _block(at, total - at, "inactive", [])


def _block(start: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": BASE + start, "size": size, "requested_size": size, "state": state, "frames": frames
    }  # fmt: skip

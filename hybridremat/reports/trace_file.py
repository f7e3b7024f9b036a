"""A plan as a trace that Perfetto and ``chrome://tracing`` open: ops as events, memory as counters.

The format is Chrome's Trace Event Format: JSON, times in microseconds (here by the plan's cost model).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridremat.files import write_atomic
from hybridremat.graph.joint import short_op
from hybridremat.plans.plan_data import PlanData
from hybridremat.reports.spans import Band
from hybridremat.reports.step_events import require_timeline, role
from hybridremat.reports.timeline import StepTimeline

PROCESS = 1
FORWARD, BACKWARD = 1, 2  # threads


def write_trace(plan: PlanData, path: str | Path) -> None:
    """Write the trace of a plan; the file appears complete or not at all.

    Raises
    ------
    PlotError
        If the step is several graphs, or has no backward.
    OutputError
        If it cannot be written.
    """
    write_atomic(Path(path), json.dumps(trace(plan)) + "\n")


def trace(plan: PlanData) -> dict[str, Any]:
    """The trace of a plan as plain JSON types."""
    timeline = require_timeline(plan)
    figures = {
        "predicted_peak_bytes": plan.predicted_peak,
        "plain_peak_bytes": plan.plain_peak,
        "limit_bytes": plan.memory_limit,
        "cost_model": plan.cost_model,
        "compiler": plan.compiler,
    }
    events = [*_names(plan.origin.model or "one step"), *_ops(timeline), *_counters(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": figures}


def _names(model: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": f"{model}, planned"}}
    for thread, name in ((FORWARD, "forward"), (BACKWARD, "backward")):
        yield {"ph": "M", "pid": PROCESS, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _ops(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    start = 0
    for now, number in enumerate(timeline.schedule.steps):
        op = timeline.graph.ops[number]
        yield {
            "ph": "X",
            "pid": PROCESS,
            "tid": FORWARD if now < timeline.schedule.num_forward else BACKWARD,
            "name": short_op(op.target or op.name),
            "cat": "recomputed" if timeline.recomputed[now] else op.phase.value,
            "ts": start / 1000,
            "dur": op.time / 1000,
            "args": {"op": op.target, "module": op.module, "source": op.source, "role": role(timeline, now)},
        }
        start += op.time


def _counters(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    """Bytes from each execution's start on: in all, and by kind."""
    executions = range(len(timeline.temporary))
    totals, bands = timeline.totals(), timeline.band_bytes(executions)
    kinds = {"blocks": bands[: timeline.block_count].sum(axis=0).tolist()}
    for row, band in enumerate(Band, start=timeline.block_count):
        kinds[band.value] = bands[row].tolist()
    start = 0
    for now in executions:
        common = {"ph": "C", "pid": PROCESS, "ts": start / 1000}
        yield {**common, "name": "step memory (bytes)", "args": {"bytes": totals[now]}}
        yield {**common, "name": "by kind (bytes)", "args": {kind: row[now] for kind, row in kinds.items()}}
        start += timeline.graph.ops[timeline.schedule.steps[now]].time

"""A plan as a trace that Perfetto and ``chrome://tracing`` open: ops as events, memory as counters.

The format is Chrome's Trace Event Format: JSON, times in microseconds (here by the plan's cost model).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from hybridremat.files import write_atomic
from hybridremat.graph.joint import short_op
from hybridremat.plans.plan_data import PlanData
from hybridremat.reports.spans import Band
from hybridremat.reports.step_events import role
from hybridremat.reports.whole_step import BETWEEN, WholeStep, whole_step

PROCESS = 1
FORWARD, BACKWARD, GRAPHS, TO_HOST, FROM_HOST = 1, 2, 3, 4, 5  # threads


def write_trace(plan: PlanData, path: str | Path) -> None:
    """Write the trace of a plan; the file appears complete or not at all.

    Raises
    ------
    PlotError
        If the step is several graphs that are compiled, or has no backward.
    OutputError
        If it cannot be written.
    """
    write_atomic(Path(path), json.dumps(trace(plan)) + "\n")


def trace(plan: PlanData) -> dict[str, Any]:
    """The trace of a plan as plain JSON types."""
    step = whole_step(plan)
    figures = {
        "predicted_peak_bytes": plan.predicted_peak,
        "plain_peak_bytes": plan.plain_peak,
        "limit_bytes": plan.memory_limit,
        "cost_model": plan.cost_model,
        "compiler": plan.compiler,
    }
    several, moves = len(step.names) > 1, bool(step.hosted())
    names = _names(plan.origin.model or "one step", several=several, moves=moves)
    events = [*names, *_ops(step), *_counters(step)]
    events += _graphs(step) if several else ()
    events += (*_waits(step), *_copies(step)) if moves else ()
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": figures}


def _names(model: str, *, several: bool, moves: bool) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": f"{model}, planned"}}
    threads = {FORWARD: "forward", BACKWARD: "backward", **({GRAPHS: "graphs"} if several else {})}
    threads |= {TO_HOST: "copies to the host", FROM_HOST: "copies from the host"} if moves else {}
    for thread, name in threads.items():
        yield {"ph": "M", "pid": PROCESS, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _ops(step: WholeStep) -> Iterator[dict[str, Any]]:
    times, starts = step.times(), step.starts()
    for now, at in enumerate(step.executions):
        yield {
            "ph": "X",
            "pid": PROCESS,
            "tid": FORWARD if at.forward else BACKWARD,
            **_described(step, now),
            "ts": starts[now] / 1000,
            "dur": times[now] / 1000,
        }


def _described(step: WholeStep, now: int) -> dict[str, Any]:
    """Name, category and arguments of an execution."""
    at = step.executions[now]
    timeline, what = step.timelines[at.section], role(step, now)
    if timeline is None or at.local is None:
        phase = "forward" if at.forward else "backward"
        return {"name": step.names[at.section], "cat": phase, "args": {"role": what, "time": "not known"}}
    op = timeline.graph.ops[timeline.schedule.steps[at.local]]
    return {
        "name": short_op(op.target or op.name),
        "cat": "recomputed" if timeline.recomputed[at.local] else op.phase.value,
        "args": {"op": op.target, "module": op.module, "source": op.source, "role": what},
    }


def _graphs(step: WholeStep) -> Iterator[dict[str, Any]]:
    """Each graph and the code between them, once in the forward and once in the backward."""
    times, starts = step.times(), step.starts()
    sections = groupby(range(len(times)), key=lambda now: step.executions[now].section_in_phase)
    for (section, forward), group in sections:
        runs = list(group)
        yield {
            "ph": "X",
            "pid": PROCESS,
            "tid": GRAPHS,
            "name": step.names[section],
            "cat": "forward" if forward else "backward",
            "ts": starts[runs[0]] / 1000,
            "dur": sum(times[now] for now in runs) / 1000,
            "args": {},
        }


def _waits(step: WholeStep) -> Iterator[dict[str, Any]]:
    """The times in which the step waits for copies."""
    for at, start, wait in zip(step.executions, step.starts(), step.waits, strict=True):
        if wait:
            yield {
                "ph": "X",
                "pid": PROCESS,
                "tid": FORWARD if at.forward else BACKWARD,
                "name": "waits for a copy",
                "cat": "wait",
                "ts": (start - wait) / 1000,
                "dur": wait / 1000,
                "args": {},
            }


def _copies(step: WholeStep) -> Iterator[dict[str, Any]]:
    for copy in step.copies():
        graph = {"graph": step.names[copy.section]} if len(step.names) > 1 else {}
        yield {
            "ph": "X",
            "pid": PROCESS,
            "tid": TO_HOST if copy.to_host else FROM_HOST,
            "name": copy.name,
            "cat": "copy",
            "ts": copy.start / 1000,
            "dur": copy.time / 1000,
            "args": {"bytes": copy.size, **graph},
        }


def _counters(step: WholeStep) -> Iterator[dict[str, Any]]:
    """Bytes from each execution's start on: in all, by kind, and of several graphs by graph."""
    totals = step.totals()
    kinds = {kind: [0] * len(totals) for kind in ("blocks", *map(str, Band))} | step.bytes_by(_kind)
    counted = {"by kind (bytes)": kinds}
    if len(step.names) > 1:
        counted["by graph (bytes)"] = step.bytes_by(lambda section, _: step.name(section))
    host = step.host_bytes()
    for now, start in enumerate(step.starts()):
        common = {"ph": "C", "pid": PROCESS, "ts": start / 1000}
        yield {**common, "name": "step memory (bytes)", "args": {"bytes": totals[now]}}
        if any(host):
            yield {**common, "name": "host memory (bytes)", "args": {"bytes": host[now]}}
        for name, rows in counted.items():
            yield {**common, "name": name, "args": {kind: row[now] for kind, row in rows.items()}}


def _kind(section: int | None, band: int | Band | None) -> str:
    """What holds bytes: blocks, or what is outside of them."""
    if section is None or band is None:
        return BETWEEN
    return "blocks" if isinstance(band, int) else band.value

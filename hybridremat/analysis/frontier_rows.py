"""The frontier as rows of data, for JSON and CSV, and as text."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import Any

from hybridremat.analysis.frontier_data import FrontierData, MeasuredPoint
from hybridremat.plans.records import FrontierPoint
from hybridremat.units import format_bytes, format_overhead_up, format_share_up

SHOWN = 25  # points in the text
Row = dict[str, Any]


def evenly_spaced(points: Sequence[FrontierPoint], count: int) -> tuple[FrontierPoint, ...]:
    """``count`` of the points, or all if there are fewer, at about equal steps of memory.

    ``points`` come by rising peak. The first and the last are kept, or only the first if ``count`` is 1.
    """
    total = len(points)
    if total <= count:
        return tuple(points)
    low, high = points[0].peak, points[-1].peak
    chosen: list[int] = []
    for number in range(count):
        wanted = low + (high - low) * number / max(1, count - 1)
        first = chosen[-1] + 1 if chosen else 0
        rest = range(first, total - (count - number) + 1)  # leaves one for each of the others
        chosen.append(min(rest, key=lambda index: abs(points[index].peak - wanted)))
    return tuple(points[index] for index in chosen)


def frontier_dict(frontier: FrontierData) -> Row:
    """The frontier as plain JSON types; ``points`` is a list of rows of equal keys."""
    checkpointed = frontier.checkpointed
    return {
        "model": frontier.origin.model,
        "inputs": [str(spec) for spec in frontier.origin.inputs],
        "cost_model": frontier.cost_model,
        "plain_peak_bytes": frontier.plain_peak,
        "points": [point_row(point, frontier) for point in frontier.points],
        "plain": point_row(frontier.plain, frontier),
        "checkpointed": None if checkpointed is None else point_row(checkpointed, frontier),
        "measurements": [_measured_row(each) for each in frontier.measurements],
        "bounds": [
            {"peak_bytes": each.peak, "overhead_bound": each.overhead} for each in frontier.bounds
        ],
        "least_bound_bytes": frontier.least_bound,
    }


def frontier_csv(frontier: FrontierData) -> str:
    """The frontier as CSV: points (``plan``), the plain step, checkpointing, then measurements."""
    rows: list[Row] = [{"kind": "plan", **point_row(point, frontier)} for point in frontier.points]
    rows.append({"kind": "plain", **point_row(frontier.plain, frontier)})
    if frontier.checkpointed is not None:
        rows.append({"kind": "checkpointed", **point_row(frontier.checkpointed, frontier)})
    for each in frontier.measurements:
        known = {} if each.predicted is None else point_row(each.predicted, frontier)
        kind = "measured plain" if each.predicted is None else "measured plan"
        rows.append({"kind": kind, **known, **_measured_row(each)})
    bounds = {each.peak: each.overhead for each in frontier.bounds}
    for row in rows if bounds else ():
        if row["kind"] == "plan" and row["peak_bytes"] in bounds:
            row["overhead_bound"] = bounds[row["peak_bytes"]]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "predicted_peak_bytes"))
    text = StringIO()
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def frontier_text(frontier: FrontierData) -> str:
    """The frontier as text: at most 25 points, and what they can be compared with."""
    shown = evenly_spaced(frontier.points, SHOWN)
    some = f", {len(shown)} of them shown" if len(shown) < len(frontier.points) else ""
    plain = f"plain step {format_bytes(frontier.plain_peak)} ({frontier.plain_peak} bytes)"
    return "\n".join([f"{plain}; {len(frontier.points)} points{some}", *_lines(frontier, shown)])


def _lines(frontier: FrontierData, shown: Iterable[FrontierPoint]) -> Iterator[str]:
    bounds = {each.peak: each.overhead for each in frontier.bounds}
    for point in shown:
        line = _line(point, frontier.plain_peak)
        if point.peak in bounds:
            line += f"  no schedule below {_bound(bounds[point.peak]):>8}"
        yield line + ("   least feasible" if point is frontier.least else "")
    if frontier.least_bound is not None:
        yield f"no schedule goes below {_memory(frontier.least_bound, frontier.plain_peak).strip()}"
    if frontier.checkpointed is not None:
        yield "each layer checkpointed, for comparison:"
        yield _line(frontier.checkpointed, frontier.plain_peak)
    if frontier.measurements:
        yield "measured (overhead against the plain step of PyTorch, run in turn):"
        for each in frontier.measurements:
            yield _measured_line(each, frontier.plain_peak)


def _line(point: FrontierPoint, plain_peak: int) -> str:
    return f"{_memory(point.peak, plain_peak)}  overhead {_overhead(point):>8}"


def _measured_line(each: MeasuredPoint, plain_peak: int) -> str:
    line = f"{_memory(each.peak, plain_peak)}  overhead {100 * each.overhead:6.1f} %  {each.seconds:.3f} s"
    if each.predicted is None:
        return f"{line}   plain, no plan"
    if each.agrees:
        return f"{line}   as predicted ({_overhead(each.predicted)})"
    outside = f", {format_bytes(each.outside)} of it outside the model" if each.outside else ""
    return f"{line}   ! {format_bytes(each.predicted.peak)} was predicted{outside}"


def _overhead(point: FrontierPoint) -> str:
    """A predicted overhead, rounded up: what is shown can be handed back as ``max_overhead``."""
    if point.overhead <= 0:
        return f"{100 * point.overhead:.1f} %"
    return format_overhead_up(point.overhead).replace("%", " %")


def _bound(overhead: float) -> str:
    """A bound of an overhead, rounded down: it is never more than was proven."""
    return f"{math.floor(1000 * overhead) / 10:.1f} %"


def _memory(size: int, plain_peak: int) -> str:
    return f"{format_bytes(size):>12} {format_share_up(size, plain_peak):>8}"


def point_row(point: FrontierPoint, frontier: FrontierData) -> Row:
    """One point as a row of JSON types."""
    return {
        "peak_bytes": point.peak,
        "share_of_plain": point.peak / max(1, frontier.plain_peak),
        "overhead": point.overhead,
        "extra_flops": point.extra_flops,
    }


def _measured_row(each: MeasuredPoint) -> Row:
    return {
        "predicted_peak_bytes": None if each.predicted is None else each.predicted.peak,
        "measured_peak_bytes": each.peak,
        "measured_outside_bytes": each.outside,
        "measured_seconds": each.seconds,
        "measured_overhead": each.overhead,
        "as_predicted": each.agrees,
    }

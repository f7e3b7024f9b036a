"""The frontier as rows: for JSON and tables of data, and as text."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from hybridremat.analysis.frontier_data import MeasuredPoint
from hybridremat.plans.records import FrontierPoint
from hybridremat.units import format_bytes, format_share_up

if TYPE_CHECKING:
    from hybridremat.analysis.frontier_data import FrontierData

SHOWN = 25  # points in the text
Row = dict[str, Any]


def spread(points: Sequence[FrontierPoint], count: int) -> tuple[FrontierPoint, ...]:
    """``count`` points (or all there are) at about equal steps of memory, the first and the last among them.

    ``points`` come by rising peak. One point alone is the first.
    """
    total = len(points)
    if total <= count:
        return tuple(points)
    low, high = points[0].peak, points[-1].peak
    chosen: list[int] = []
    for number in range(count):
        wanted = low + (high - low) * number / max(1, count - 1)
        first = chosen[-1] + 1 if chosen else 0
        rest = range(first, total - (count - number) + 1)  # one is left for each of the others
        chosen.append(min(rest, key=lambda index: abs(points[index].peak - wanted)))
    return tuple(points[index] for index in chosen)


def curve_dict(curve: FrontierData) -> Row:
    """The curve as plain JSON types; ``points`` is a list of rows of equal keys."""
    return {
        "model": curve.origin.model,
        "inputs": [str(spec) for spec in curve.origin.inputs],
        "cost_model": curve.cost_model,
        "plain_peak_bytes": curve.plain_peak,
        "points": [_point_row(point, curve) for point in curve.points],
        "plain": _point_row(curve.plain, curve),
        "checkpointed": None if curve.checkpointed is None else _point_row(curve.checkpointed, curve),
        "measurements": [_measured_row(each) for each in curve.measurements],
    }


def curve_csv(curve: FrontierData) -> str:
    """One line a point: of the frontier (``plan``), the plain step, checkpointing, then measurements."""
    rows: list[Row] = [{"kind": "plan", **_point_row(point, curve)} for point in curve.points]
    rows.append({"kind": "plain", **_point_row(curve.plain, curve)})
    if curve.checkpointed is not None:
        rows.append({"kind": "checkpointed", **_point_row(curve.checkpointed, curve)})
    for each in curve.measurements:
        known = {} if each.predicted is None else _point_row(each.predicted, curve)
        kind = "measured plain" if each.predicted is None else "measured plan"
        rows.append({"kind": kind, **known, **_measured_row(each)})
    names = list(dict.fromkeys(name for row in rows for name in row if name != "predicted_peak_bytes"))
    text = StringIO()
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def curve_text(curve: FrontierData) -> str:
    """The curve for people: some 25 of its points, and what it can be compared with."""
    shown = spread(curve.points, SHOWN)
    some = f", {len(shown)} of them shown" if len(shown) < len(curve.points) else ""
    plain = f"plain step {format_bytes(curve.plain_peak)} ({curve.plain_peak} bytes)"
    return "\n".join([f"{plain}; {len(curve.points)} points{some}", *_lines(curve, shown)])


def _lines(curve: FrontierData, shown: Iterable[FrontierPoint]) -> Iterator[str]:
    for point in shown:
        yield _line(point, curve.plain_peak) + ("   least feasible" if point is curve.least else "")
    if curve.checkpointed is not None:
        yield "each block checkpointed by itself, for comparison:"
        yield _line(curve.checkpointed, curve.plain_peak)
    if curve.measurements:
        yield "measured (overhead against the plain step of PyTorch, run in turn):"
        for each in curve.measurements:
            yield _measured_line(each, curve.plain_peak)


def _line(point: FrontierPoint, plain_peak: int) -> str:
    return f"{_memory(point.peak, plain_peak)}  overhead {100 * point.overhead:6.1f} %"


def _measured_line(each: MeasuredPoint, plain_peak: int) -> str:
    line = f"{_memory(each.peak, plain_peak)}  overhead {100 * each.overhead:6.1f} %  {each.seconds:.3f} s"
    if each.predicted is None:
        return f"{line}   plain, no plan"
    if each.agrees:
        return f"{line}   as predicted ({100 * each.predicted.overhead:.1f} %)"
    outside = f", {format_bytes(each.outside)} of it outside the model" if each.outside else ""
    return f"{line}   ! {format_bytes(each.predicted.peak)} was predicted{outside}"


def _memory(size: int, plain_peak: int) -> str:
    return f"{format_bytes(size):>12} {format_share_up(size, plain_peak):>8}"


def _point_row(point: FrontierPoint, curve: FrontierData) -> Row:
    return {
        "peak_bytes": point.peak,
        "share_of_plain": point.peak / max(1, curve.plain_peak),
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

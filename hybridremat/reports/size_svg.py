"""What a step needs over one of its sizes, as a small picture in an HTML page that needs no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from hybridremat.plans.sizes import SizeRow, curves, varying
from hybridremat.units import format_bytes

WIDTH, HEIGHT, LEFT, BELOW = 640, 180, 80, 24  # of one chart, and of what is beside and below its lines
PLAIN: Final = "#D55E00"
PLANNED: Final = "#0072B2"


def size_charts(rows: Sequence[SizeRow]) -> list[Markup]:
    """Memory, and extra time, over the size that varies most; none where nothing varies."""
    over = varying(rows)
    fits = [row for row in rows if row.needed is not None]
    if over is None or not fits:
        return []
    ends = min(row.sizes[over] for row in fits), max(row.sizes[over] for row in fits)
    memory = max(max(row.plain_peak or 0, row.needed or 0) for row in fits)
    time = max(max(row.overhead or 0.0 for row in fits), 0.001)
    lines = [(curve, each) for curve in curves(rows, over) for each in (PLAIN, PLANNED)]
    drawn = [
        _line([(row.sizes[over], (row.plain_peak if color == PLAIN else row.needed) or 0) for row in curve],
              ends, memory, color)
        for curve, color in lines
    ]
    above = [
        _line([(row.sizes[over], row.overhead or 0.0) for row in curve], ends, time, PLANNED)
        for curve in curves(rows, over)
    ]
    return [
        _chart(drawn, over, ends, format_bytes(memory), "Step memory: the plain step (orange) and the plan"),
        _chart(above, over, ends, f"{100 * time:.1f} %", "Extra time of the plan"),
    ]


def _line(points: Sequence[tuple[int, float]], ends: tuple[int, int], most: float, color: str) -> Markup:
    width = max(1, ends[1] - ends[0])
    at = " ".join(
        f"{LEFT + (size - ends[0]) / width * (WIDTH - LEFT - 10):.1f},"
        f"{HEIGHT - BELOW - figure / most * (HEIGHT - BELOW - 14):.1f}"
        for size, figure in points
    )
    return Markup(
        '<polyline points="{}" fill="none" stroke="{}" stroke-width="2"/>'
    ).format(at, color)


def _chart(lines: Sequence[Markup], over: str, ends: tuple[int, int], most: str, label: str) -> Markup:
    base = HEIGHT - BELOW
    return Markup(
        '<svg viewBox="0 0 {w} {h}" role="img" aria-label="{label}" style="max-width: {w}px; width: 100%">'
        '<path d="M{x} 8V{base}H{end}" fill="none" stroke="currentColor" stroke-width="0.8"/>'
        '<g fill="currentColor" font-size="11"><text x="{left}" y="16" text-anchor="end">{most}</text>'
        '<text x="{left}" y="{base}" text-anchor="end">0</text><text x="{x}" y="{low}">{over}={first}</text>'
        '<text x="{end}" y="{low}" text-anchor="end">{last}</text></g>{lines}</svg>'
    ).format(
        w=WIDTH, h=HEIGHT, label=label, x=LEFT, base=base, end=WIDTH - 10, left=LEFT - 6, low=HEIGHT - 8,
        most=most, over=over, first=ends[0], last=ends[1], lines=Markup("").join(lines),
    )  # fmt: skip

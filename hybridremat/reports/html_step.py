"""The data of a step's chart: the timeline thinned, its bands, and the lifetimes of its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridremat.graph.memory import MemorySimulator
from hybridremat.reports.html_tables import Tables
from hybridremat.reports.spans import Band, Span
from hybridremat.reports.timeline import StepTimeline, thinned

MOST_POINTS = 600  # stretches in a chart: about one for each two pixels of a wide screen
MOST_BANDS = 64  # bands of blocks in a chart; neighbouring blocks share one where there are more
MOST_SPANS = 15_000  # lifetimes in one chart's data; where there are more, only those at the peak are written

OUTSIDE = {band: -1 - place for place, band in enumerate(Band)}


def step_data(timeline: StepTimeline, tables: Tables) -> dict[str, Any]:
    """One step as JSON types; bytes, nanoseconds, and executions counted from 0."""
    totals = timeline.totals()
    stretches = thinned(totals, timeline.schedule.num_forward, MOST_POINTS)
    shown = [stretch.shown for stretch in stretches]
    over = MemorySimulator(timeline.graph).overwritten(timeline.schedule)
    clock, moves = timeline.moves.starts, timeline.moves.values
    held = [(each.size, each.move.birth, each.move.ready) for each in moves]
    return {
        "executions": len(totals),
        "forward": timeline.schedule.num_forward,
        "time": clock[-1],
        "peak": max(totals, default=0),
        "peakAt": timeline.peak_at,
        "first": [stretch.first for stretch in stretches],
        "start": [clock[stretch.first] for stretch in stretches],
        "shown": shown,
        "total": [totals[at] for at in shown],
        "temporary": [timeline.temporary[at] for at in shown],
        "op": [tables.op(timeline.schedule.steps[at], timeline.graph, in_place=at in over) for at in shown],
        "block": [timeline.blocks[at] for at in shown],
        "bands": _bands(timeline, shown),
        "host": host_changes(held, shown),
        **_spans(timeline, tables),
    }


def band_names(blocks: int) -> list[str]:
    """Labels of a chart's bands, from the bottom: blocks, then memory outside of them."""
    each = blocks_per_band(blocks)
    firsts = range(0, blocks, each)
    names = [(first, min(first + each, blocks) - 1) for first in firsts]
    return [f"block {a}" if a == b else f"blocks {a}–{b}" for a, b in names] + [str(band) for band in Band]


def blocks_per_band(blocks: int) -> int:
    """How many neighbouring blocks share a band."""
    return max(1, -(-blocks // MOST_BANDS))


def _bands(timeline: StepTimeline, shown: Sequence[int]) -> list[list[int]]:
    """Each band as its changes: index of a point, bytes from there on, and so on."""
    rows = timeline.band_bytes(shown)
    count, each = timeline.block_count, blocks_per_band(timeline.block_count)
    blocks = [rows[first : min(first + each, count)].sum(0) for first in range(0, count, each)]
    return [changes(row.tolist()) for row in (*blocks, *rows[count:])]


def host_changes(held: Sequence[tuple[int, int, int]], shown: Sequence[int]) -> list[int]:
    """Bytes in host memory as changes, of what is there from one execution to another: (bytes, from, to)."""
    row = [sum(size for size, birth, death in held if birth <= at <= death) for at in shown]
    return changes(row)


def changes(row: Sequence[int]) -> list[int]:
    """A row as its changes: index, what it is from there on, and so on."""
    found: list[int] = []
    before = 0
    for place, size in enumerate(row):
        if size != before:
            found += (place, size)
            before = size
    return found


def _spans(timeline: StepTimeline, tables: Tables) -> dict[str, Any]:
    """Lifetimes as columns; value −1 is a generator state, and bands below 0 are those outside of blocks."""
    spans: list[Span] = [span for span in timeline.spans if span.size]
    complete = len(spans) <= MOST_SPANS
    if not complete:
        spans = [span for span in spans if span.birth <= timeline.peak_at <= span.death]
    return {
        "complete": complete,
        "states": timeline.graph.rng_state_bytes,
        "value": [-1 if s.value is None else tables.value(s.value) for s in spans],
        "birth": [span.birth for span in spans],
        "death": [span.death for span in spans],
        "band": [OUTSIDE[s.band] if isinstance(s.band, Band) else s.band for s in spans],
    }

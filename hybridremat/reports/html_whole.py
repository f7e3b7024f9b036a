"""The data of the chart of a whole step of several graphs: as that of one graph, each graph with a band."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridremat.graph.joint import JointGraph, Phase
from hybridremat.graph.memory import MemorySimulator
from hybridremat.plans.plan_data import PlanData
from hybridremat.reports.html_step import MOST_BANDS, MOST_POINTS, MOST_SPANS, OUTSIDE, changes, host_changes
from hybridremat.reports.html_tables import Tables
from hybridremat.reports.moves import starts
from hybridremat.reports.plain_step import plain_plan
from hybridremat.reports.spans import Band
from hybridremat.reports.timeline import thinned
from hybridremat.reports.whole_step import BETWEEN, Holding, WholeStep, whole_step

FIGURES = ("memory_limit", "predicted_peak", "plain_peak")


def whole_data(plan: PlanData) -> dict[str, Any]:
    """The step as JSON types: bytes, nanoseconds, and executions from 0; ``names`` are the graphs'."""
    tables = Tables(None)
    planned = whole_step(plan)
    bands = _Bands.of(planned)
    steps = {
        name: _step(step, bands, tables)
        for name, step in (("planned", planned), ("plain", whole_step(plain_plan(plan))))
    }
    return {
        "figures": {name: getattr(plan, name) for name in FIGURES},
        "names": bands.names,
        "bands": bands.labels,
        "blocksPerBand": bands.each,
        "steps": steps,
        "texts": tables.texts,
        "ops": tables.ops,
        "values": tables.values,
    }


@dataclass(frozen=True)
class _Bands:
    """What each section is drawn as: graphs in order, neighbours together if there are many; then the rest.

    ``names`` are those that spans have, ``numbers`` the section's place among them, ``each`` how many share a
    band of the chart.
    """

    names: list[str]
    numbers: Mapping[int | None, int]
    each: int

    @staticmethod
    def of(step: WholeStep) -> _Bands:
        graphs = [number for number, name in enumerate(step.names) if name != BETWEEN]
        each = max(1, -(-len(graphs) // MOST_BANDS))
        aside = each * -(-len(graphs) // each)  # what is between graphs has a band of its own
        numbers: dict[int | None, int] = dict.fromkeys((None, *range(len(step.names))), aside)
        numbers |= {section: place for place, section in enumerate(graphs)}
        names = [step.names[section] for section in graphs]
        return _Bands([*names, *[""] * (aside - len(names)), BETWEEN], numbers, each)

    @property
    def labels(self) -> list[str]:
        """Those of the chart's bands, from the bottom."""
        found = []
        for first in range(0, len(self.names), self.each):
            group = [name for name in self.names[first : first + self.each] if name]
            found.append(" … ".join(dict.fromkeys((group[0], group[-1]))))
        return [*found, *map(str, Band)]

    def span(self, held: Holding) -> int:
        """The number of the band that a span names: below 0 are those outside of graphs' own."""
        band = None if held.span is None else held.span.band
        if isinstance(band, Band) and band is not Band.SHARED:
            return OUTSIDE[band]
        return self.numbers[held.section]

    def row(self, number: int) -> int:
        """The band of the chart that a number names."""
        return len(self.labels) - len(Band) - 1 - number if number < 0 else number // self.each


def _step(step: WholeStep, bands: _Bands, tables: Tables) -> dict[str, Any]:
    totals, clock = step.totals(), starts(step.times(), step.waits)
    held = [(each.size, each.birth, each.death) for each in step.hosted()]
    forward = sum(each.forward for each in step.executions)
    stretches = thinned(totals, forward, MOST_POINTS)
    shown = [stretch.shown for stretch in stretches]
    return {
        "executions": len(totals),
        "forward": forward,
        "time": clock[-1],
        "peak": max(totals),
        "peakAt": totals.index(max(totals)),
        "first": [stretch.first for stretch in stretches],
        "start": [clock[stretch.first] for stretch in stretches],
        "shown": shown,
        "total": [totals[at] for at in shown],
        "temporary": [step.temporary[at] for at in shown],
        "op": list(_ops(step, shown, tables)),
        "block": [bands.numbers[step.executions[at].section] for at in shown],
        "bands": _rows(step, bands, shown),
        "host": host_changes(held, shown),
        **_spans(step, bands, tables, totals.index(max(totals))),
    }


def _ops(step: WholeStep, shown: Sequence[int], tables: Tables) -> Iterator[int]:
    over: dict[int, dict[int, int]] = {}
    for at in shown:
        run = step.executions[at]
        timeline = step.timelines[run.section]
        if timeline is None or run.local is None:
            phase = Phase.FORWARD if run.forward else Phase.BACKWARD
            yield tables.code(step.names[run.section], phase)
            continue
        if run.section not in over:
            over[run.section] = MemorySimulator(timeline.graph).overwritten(timeline.schedule)
        own = _own(tables, timeline.graph)
        in_place = run.local in over[run.section]
        yield own.op(timeline.schedule.steps[run.local], timeline.graph, in_place=in_place)


def _own(tables: Tables, graph: JointGraph) -> Tables:
    """The tables for a graph: those that run in several ways have ops and values of their own."""
    return tables.of_graph(id(graph), graph)


def _rows(step: WholeStep, bands: _Bands, shown: Sequence[int]) -> list[list[int]]:
    """Each band as its changes, as in a chart of one graph."""
    change = np.zeros((len(bands.labels), len(shown) + 1), np.int64)
    births = np.searchsorted(shown, [held.birth for held in step.holdings])
    deaths = np.searchsorted(shown, [held.death for held in step.holdings], side="right")
    for held, birth, death in zip(step.holdings, births, deaths, strict=True):
        row = bands.row(bands.span(held))
        change[row, birth] += held.size
        change[row, death] -= held.size
    found = np.cumsum(change[:, :-1], axis=1)
    found[bands.row(OUTSIDE[Band.TEMPORARY])] += np.array(step.temporary, np.int64)[list(shown)]
    return [changes(row) for row in found.tolist()]


def _spans(step: WholeStep, bands: _Bands, tables: Tables, peak_at: int) -> dict[str, Any]:
    """Lifetimes as columns, as in a chart of one graph."""
    held = [each for each in step.holdings if each.size]
    complete = len(held) <= MOST_SPANS
    if not complete:
        held = [each for each in held if each.birth <= peak_at <= each.death]
    return {
        "complete": complete,
        "states": 0,
        "value": [_value(step, each, tables) for each in held],
        "birth": [each.birth for each in held],
        "death": [each.death for each in held],
        "band": [bands.span(each) for each in held],
    }


def _value(step: WholeStep, held: Holding, tables: Tables) -> int:
    timeline = None if held.section is None else step.timelines[held.section]
    if held.span is None or timeline is None:
        return tables.block(f"held {BETWEEN}", held.size)
    if held.span.value is None:
        return tables.block("generator state", held.size)
    return _own(tables, timeline.graph).value(held.span.value)

"""The data of a report's charts as JSON types: bytes, nanoseconds, and shares as fractions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hybridremat.graph.joint import as_plain, plain_schedule
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import FrontierPoint, PlanDetails, PlannedBlock
from hybridremat.reports.block_rows import block_rows, module_names, option_text
from hybridremat.reports.html_step import band_names, blocks_per_band, step_data
from hybridremat.reports.html_tables import Tables
from hybridremat.reports.html_whole import whole_data
from hybridremat.reports.timeline import step_timeline
from hybridremat.sequence.decisions import Decision, Forward, ForwardOption

VERSION = 1

# Values listed block by block; where there are more, only the first of identical blocks lists its own.
MOST_BLOCK_VALUES = 20_000

_FIGURES = (
    "memory_limit",
    "asked_limit",
    "reserve",
    "forwards",
    "predicted_peak",
    "needed",
    "plain_peak",
    "least_peak",
    "overhead",
    "extra_flops",
    "saved_bytes",
    "cost_model",
)


def report_data(plan: PlanData) -> dict[str, Any]:
    """The data of all charts; ``graphs`` has one entry for each distinct graph of the step.

    ``whole`` is a step of several graphs as one, None for others.
    """
    return {
        "version": VERSION,
        "figures": figures(plan),
        "whole": whole_data(plan) if plan.parts and plan.composition and plan.compiler == "eager" else None,
        "graphs": [_graph_data(part) for part in plan.parts or (plan,)],
    }


def figures(plan: PlanData) -> dict[str, Any]:
    """The numbers of a plan, by the names of its fields."""
    return {name: getattr(plan, name) for name in _FIGURES}


def _graph_data(plan: PlanData) -> dict[str, Any]:
    details = plan.details
    tables = Tables(None if details is None else details.graph)
    drawn: dict[str, Any] = {"steps": None, "chain": None, "frontier": None}
    if details is not None and plan.schedule.steps:
        drawn = _drawn(plan, details, tables)
    blocks = _block_values(plan.blocks, tables)
    return {
        "figures": figures(plan),
        **drawn,
        "blocks": blocks,
        "texts": tables.texts,
        "ops": tables.ops,
        "values": tables.values,
    }


def _drawn(plan: PlanData, details: PlanDetails, tables: Tables) -> dict[str, Any]:
    chain = details.chain
    plain = replace(chain, graph=as_plain(chain.graph))
    steps = {
        "planned": step_data(step_timeline(chain, plan.schedule, details.link), tables),
        "plain": step_data(step_timeline(plain, plain_schedule(chain.graph)), tables),
    }
    return {
        "bands": band_names(len(chain.blocks)),
        "blocksPerBand": blocks_per_band(len(chain.blocks)),
        "steps": steps,
        "chain": _chain(plan, details),
        "frontier": _frontier(plan, details),
    }


def _chain(plan: PlanData, details: PlanDetails) -> dict[str, Any]:
    graph, names = details.graph, module_names(plan.blocks)

    def size(values: Iterable[int]) -> int:
        return sum(graph.values[value].bytes for value in values)

    return {
        "blocks": [
            {
                "name": module_range(names[b.index]),
                "saved": b.saved_bytes,
                "option": option_text(b),
                "recomputed": len(b.recomputed),
                "recomputedBytes": sum(record.bytes for record, _ in b.recomputed),
                "extra": b.extra_time,
            }
            for b in plan.blocks
        ],
        "boundary": [size(values) for values in details.chain.boundary],
        "gradient": [size(values) for values in details.chain.gradient_boundary],
        "reruns": reruns(details.decisions),
    }


def module_range(names: Sequence[str]) -> str:
    """The first and the last module of a block."""
    return " … ".join(dict.fromkeys((names[0], names[-1]))) if names else "(no module)"


def reruns(decisions: Sequence[Decision]) -> list[dict[str, int]]:
    """Re-runs of whole forwards: blocks ``first`` … ``last``, right before the backward of ``before``."""
    found: list[dict[str, int]] = []
    running: list[int] = []
    backward = False
    for decision in decisions:
        if isinstance(decision, Forward | ForwardOption):
            running.append(decision.block)
            continue
        if backward and running:
            found.append({"before": decision.block, "first": running[0], "last": running[-1]})
        running, backward = [], True
    return found


def _frontier(plan: PlanData, details: PlanDetails) -> dict[str, Any]:
    chosen = (plan.predicted_peak, plan.overhead, plan.extra_flops)
    points = [_point(point) for point in details.frontier]
    checkpointed = details.checkpointed
    return {
        "points": points,
        "chosen": list(chosen),
        "plain": [plan.plain_peak, 0.0, 0.0],
        "checkpointed": None if checkpointed is None else _point(checkpointed),
    }


def _point(point: FrontierPoint) -> list[float]:
    return [point.peak, point.overhead, point.extra_flops]


def _block_values(blocks: Sequence[PlannedBlock], tables: Tables) -> list[list[list[int]] | int]:
    """For each block, rows of (value, 1 if it is saved and 2 if it moves, how often it is recomputed).

    A number in place of the rows is the index of the block that lists the same values.
    """
    count = sum(len(b.saved) + len(b.recomputed) + len(b.freed) + len(b.moved) for b in blocks)
    if count <= MOST_BLOCK_VALUES:
        return [_values(block, tables) for block in blocks]
    stands_for = {b.index: row.first.index for row in block_rows(blocks) for b in row.blocks}
    return [
        _values(block, tables) if stands_for[block.index] == block.index else stands_for[block.index]
        for block in blocks
    ]


def _values(block: PlannedBlock, tables: Tables) -> list[list[int]]:
    rows = {tables.record(record): [1, 0] for record in block.saved}
    rows |= {tables.record(record): [2, 0] for record in block.moved}
    for record, times in block.recomputed:
        rows.setdefault(tables.record(record), [0, 0])[1] = times
    for record in block.freed:
        rows.setdefault(tables.record(record), [0, 0])
    return [[place, *row] for place, row in rows.items()]

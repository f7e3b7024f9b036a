"""A pipeline's plan as text."""

from __future__ import annotations

from collections.abc import Iterable

from hybridremat.analysis.pipelines.plan_data import PipelineData, PlannedStage
from hybridremat.units import format_bytes, format_time

_HEAD = ("stage", "device", "layers", "in flight", "forward", "backward", "recomputed", "peak", "of")


def pipeline_text(plan: PipelineData) -> str:
    """One line for the step, and a table of its stages."""
    rows = [_HEAD, *map(_row, plan.stages)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEAD))]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join([_first_line(plan), *lines])


def _first_line(plan: PipelineData) -> str:
    each = f", {plan.stages_per_device} stages on each" if plan.stages_per_device > 1 else ""
    return (
        f"{plan.schedule}: {plan.microbatches} microbatches on {plan.devices} devices{each}, "
        f"{format_time(plan.step_time)} a step, {plan.bubble:.1%} of it waiting"
    )


def _row(stage: PlannedStage) -> tuple[str, ...]:
    share = stage.extra_time / stage.plain_time if stage.plain_time else 0.0
    return (
        str(stage.index),
        str(stage.device),
        _span(stage.layers),
        str(stage.forwards),
        format_time(stage.forward_time),
        format_time(stage.backward_time),
        f"{share:+.1%}",
        format_bytes(stage.predicted_peak),
        format_bytes(stage.device_memory),
    )


def _span(layers: Iterable[str]) -> str:
    first, *rest = layers
    return f"{first} … {rest[-1].rpartition('.')[2]}" if rest else first

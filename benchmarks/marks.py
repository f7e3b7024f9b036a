"""The recorded frontiers and per-layer checkpointing, and how a frontier compares with them.

``data/reference_frontiers.csv`` holds, for eight models, the frontier to reach: peak as a share of plain
eager training's peak (one thread), and extra flops. ``data/per_layer_checkpoint.csv`` holds what
checkpointing each layer needs on the same models.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Mark:
    """Extra flops in percent at a peak in percent of plain eager training."""

    peak: float
    extra: float


@dataclass(frozen=True)
class Comparison:
    """How a frontier stands against a recorded one, in percentage points (positive: worse).

    ``worst`` is the largest excess of extra flops at any recorded share that is feasible here, ``at`` where;
    ``least`` and ``recorded_least`` are the least peaks in percent of plain eager training.
    """

    worst: float
    at: float
    least: float
    recorded_least: float


def recorded_frontier(model: str) -> tuple[int, tuple[Mark, ...]]:
    """Plain eager peak in bytes, and the recorded points."""
    with (DATA / "reference_frontiers.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    marks = tuple(Mark(float(row["peak_percent"]), float(row["extra_flops_percent"])) for row in rows)
    return int(rows[0]["plain_eager_peak_bytes"]), marks


def recorded_models() -> tuple[str, ...]:
    """Names of the recorded models, dropout behind an underscore."""
    with (DATA / "reference_frontiers.csv").open() as file:
        return tuple(dict.fromkeys(row["model"] for row in csv.DictReader(file)))


def per_layer_checkpoint(model: str) -> tuple[Mark, ...]:
    """What checkpointing each layer needs; empty where it was not recorded."""
    with (DATA / "per_layer_checkpoint.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    return tuple(Mark(float(row["peak_percent"]), float(row["extra_flops_percent"])) for row in rows)


def extra_at(points: Sequence[Mark], peak: float) -> float | None:
    """Least extra flops among points of at most this peak (recorded shares are rounded to 0.01)."""
    fitting = [point.extra for point in points if point.peak <= peak + 0.005]
    return min(fitting) if fitting else None


def compare(points: Sequence[Mark], recorded: Sequence[Mark]) -> Comparison:
    """Hold a frontier against a recorded one."""
    excess = [
        (extra - mark.extra, mark.peak)
        for mark in recorded
        if (extra := extra_at(points, mark.peak)) is not None
    ]
    worst, at = max(excess)
    return Comparison(worst, at, min(p.peak for p in points), min(m.peak for m in recorded))

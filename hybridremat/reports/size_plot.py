"""What a step needs at many sizes, and what its plans cost there, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from hybridremat.errors import PlotError
from hybridremat.files import write_atomic
from hybridremat.plans.sizes import SizeRow, curves, varying
from hybridremat.reports.figures import BLUE, GREEN, VERMILION, new_figure, picture, require_suffix
from hybridremat.units import memory_unit


def plot_sizes(rows: Sequence[SizeRow], path: str | Path) -> None:
    """Draw memory above and overhead below, over the size that varies; the file is written whole or not.

    Raises
    ------
    PlotError, MissingPackageError, OSError
        As :meth:`hybridremat.SizeCurve.plot`.
    """
    suffix, over = require_suffix(path), varying(rows)
    if over is None:
        raise PlotError("no size varies: plan at several, plan.curve(length=[128, 256]), for one")
    unit, size = memory_unit(max(row.plain_peak or row.needed or 0 for row in rows))
    figure = new_figure()
    memory, time = figure.subplots(2, 1, sharex=True)
    for number, mine in enumerate(curves(rows, over)):
        at = [row.sizes[over] for row in mine]
        names = ("plain step", "planned") if number == 0 else (None, None)
        plain = [_scaled(row.plain_peak, size) for row in mine]
        planned = [_scaled(row.needed, size) for row in mine]
        memory.plot(at, plain, ".-", color=VERMILION, label=names[0])
        memory.plot(at, planned, ".-", color=BLUE, label=names[1])
        time.plot(at, [_scaled(row.overhead, 0.01) for row in mine], ".-", color=GREEN)
    limits = {row.memory_limit for row in rows if row.memory_limit is not None}
    if len(limits) == 1:
        memory.axhline(limits.pop() / size, color="black", linewidth=0.8, linestyle="--", label="limit")
    memory.set_ylabel(f"step memory, {unit}")
    memory.set_ylim(bottom=0)
    memory.legend()
    time.set_ylabel("extra time, %")
    time.set_xlabel(over)
    write_atomic(Path(path), picture(figure, suffix))


def _scaled(amount: float | None, unit: float) -> float:
    """An amount in a unit; where nothing fits, nothing is drawn."""
    return math.nan if amount is None else amount / unit

"""What a step needs at many sizes, and what its plans cost there, as a picture."""

from __future__ import annotations

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
    unit, size = memory_unit(max(row.plain_peak for row in rows))
    if over is None:
        raise PlotError("no size varies: plan at several, plan.curve(length=[128, 256]), for one")
    figure = new_figure()
    memory, time = figure.subplots(2, 1, sharex=True)
    for number, mine in enumerate(curves(rows, over)):
        at = [row.sizes[over] for row in mine]
        names = ("plain step", "planned") if number == 0 else (None, None)
        planned = [None if row.needed is None else row.needed / size for row in mine]
        memory.plot(at, [row.plain_peak / size for row in mine], ".-", color=VERMILION, label=names[0])
        memory.plot(at, planned, ".-", color=BLUE, label=names[1])
        time.plot(at, [100 * (row.overhead or 0.0) for row in mine], ".-", color=GREEN)
    limits = {row.memory_limit for row in rows if row.memory_limit is not None}
    if len(limits) == 1:
        memory.axhline(limits.pop() / size, color="black", linewidth=0.8, linestyle="--", label="limit")
    memory.set_ylabel(f"step memory, {unit}")
    memory.set_ylim(bottom=0)
    memory.legend()
    time.set_ylabel("extra time, %")
    time.set_xlabel(over)
    write_atomic(Path(path), picture(figure, suffix))

"""The command ``frontier``: the whole curve as text, picture, table or JSON."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from hybridremat.analysis.frontier import Frontier
from hybridremat.analysis.frontier_plot import SUFFIXES, new_figure
from hybridremat.api import frontier
from hybridremat.cli.inputs import limit_value, load, overhead_value, shared_settings
from hybridremat.cli.output import require_writable, results_apart
from hybridremat.errors import LimitError, PlotError, UsageError
from hybridremat.files import write_whole
from hybridremat.units import format_bytes, format_share_up, parse_overhead, resolve_limit

DATA = (".csv", ".json")


def run_frontier(options: Namespace) -> int:
    """Plan once, measure what was asked for, write the files, and print the curve.

    Raises
    ------
    PlotError, MissingPackageError, OSError
        If a file cannot be written as its suffix says, before anything is planned.
    LimitError
        If ``--measure`` is no number of plans, or the limit or the overhead cannot be read.
    InfeasibleLimitError
        If no point satisfies what was asked; no file is written.
    """
    if options.device_spec is not None and options.measure is not None:
        raise UsageError("--measure runs plans here; those of --device-spec are for another device")
    outputs = [Path(name) for name in options.output or ()]
    asked = _asked(options)
    _require_known(outputs, options.measure)
    target = load(options)
    step = target.model, target.args, target.kwargs
    with results_apart(active=options.json):
        spec, shared = options.device_spec, shared_settings(options)
        curve = frontier(*step, progress=not options.quiet, device_spec=spec, **shared)
        chosen = _chosen(curve, asked)
        if options.measure is not None:
            curve = curve.measured(*step, count=options.measure)
    data = {**curve.to_dict(), "chosen": chosen}
    for path in outputs:
        _write(curve, path, asked, data)
    sys.stdout.write(json.dumps(data, indent=1) + "\n" if options.json else _text(curve, chosen))
    return 0


def _asked(options: Namespace) -> dict[str, Any]:
    """What chooses the point, read before anything is planned."""
    asked: dict[str, Any] = {}
    if options.limit is not None:
        asked["memory_limit"] = limit_value(options.limit)
        resolve_limit(asked["memory_limit"], 1 << 40)
    if options.max_overhead is not None:
        asked["max_overhead"] = overhead_value(options.max_overhead)
        parse_overhead(asked["max_overhead"])
    return asked


def _require_known(outputs: list[Path], measure: int | None) -> None:
    for path in outputs:
        if path.suffix.lower() not in (*SUFFIXES, *DATA):
            known = ", ".join((*SUFFIXES, *DATA))
            raise PlotError(f"-o {path}: what to write there is told by its suffix, one of {known}")
        if path.suffix.lower() in SUFFIXES:
            new_figure()
        require_writable(str(path))
    if measure is not None and measure < 1:
        raise LimitError(f"--measure {measure} is out of range: give a number ≥ 1 of plans to be measured")


def _chosen(curve: Frontier, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of the point that was asked for, as a row."""
    if not asked:
        return None
    point = curve.at(**asked)
    rows = curve.to_dict()["points"]
    row: dict[str, Any] = rows[curve.points.index(point)]
    return row


def _write(curve: Frontier, path: Path, asked: dict[str, Any], data: dict[str, Any]) -> None:
    suffix = path.suffix.lower()
    if suffix == ".csv":
        curve.to_csv(path)
    elif suffix == ".json":
        write_whole(path, json.dumps(data, indent=1) + "\n")
    else:
        curve.plot(path, **asked)


def _text(curve: Frontier, chosen: dict[str, Any] | None) -> str:
    if chosen is None:
        return f"{curve}\n"
    peak = chosen["peak_bytes"]
    share = format_share_up(peak, curve.plain_peak)
    return (
        f"{curve}\nchosen: {format_bytes(peak)} ({peak} bytes, {share} of plain), {chosen['overhead']:+.1%} "
        f"time by cost model {curve.cost_model}, {chosen['extra_flops']:+.1%} flops\n"
    )

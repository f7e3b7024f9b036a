"""The command ``frontier``: the whole curve as text, picture, table or JSON.

Only argparse loads here; torch and matplotlib load when the command runs.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridremat.command_values import limit_value, overhead_value
from hybridremat.errors import LimitError, PlotError, UsageError

if TYPE_CHECKING:
    from hybridremat.curve import Frontier

DATA = (".csv", ".json")


def add_frontier_options(parser: ArgumentParser) -> None:
    """What ``frontier`` takes beside the target and how it is planned."""
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", action="append", help=".png, .svg, .pdf, .csv or .json; repeatable")
    add("--limit", metavar="SIZE", help="mark the fastest plan under this limit: 6GiB, or 50%% of plain")
    add("--max-overhead", metavar="SHARE", help="mark the smallest plan within this extra time: 0.1 or 10%%")
    add("--measure", type=int, metavar="K", help="run and measure the plain step and K plans of the curve")


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
    from hybridremat.api import frontier
    from hybridremat.command_input import load, shared_settings
    from hybridremat.talking import results_apart

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
    from hybridremat.limits import parse_overhead, resolve_limit

    asked: dict[str, Any] = {}
    if options.limit is not None:
        asked["memory_limit"] = limit_value(options.limit)
        resolve_limit(asked["memory_limit"], 1 << 40)
    if options.max_overhead is not None:
        asked["max_overhead"] = overhead_value(options.max_overhead)
        parse_overhead(asked["max_overhead"])
    return asked


def _require_known(outputs: list[Path], measure: int | None) -> None:
    from hybridremat.command_output import require_writable
    from hybridremat.curve_plot import SUFFIXES, new_figure

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
    from hybridremat.graph.whole_files import write_whole

    suffix = path.suffix.lower()
    if suffix == ".csv":
        curve.to_csv(path)
    elif suffix == ".json":
        write_whole(path, json.dumps(data, indent=1) + "\n")
    else:
        curve.plot(path, **asked)


def _text(curve: Frontier, chosen: dict[str, Any] | None) -> str:
    from hybridremat.limits import format_bytes

    if chosen is None:
        return f"{curve}\n"
    return (
        f"{curve}\nchosen: {format_bytes(chosen['peak_bytes'])} ({chosen['peak_bytes']} bytes, "
        f"{chosen['share_of_plain']:.1%} of plain), {chosen['overhead']:+.1%} time by cost model "
        f"{curve.cost_model}, {chosen['extra_flops']:+.1%} flops\n"
    )

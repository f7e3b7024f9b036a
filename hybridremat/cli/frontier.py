"""The command ``frontier``: all plans of a step as text, picture, table or JSON."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from hybridremat.analysis.frontier import Frontier
from hybridremat.analysis.frontier_rows import point_row
from hybridremat.api import frontier as make_frontier
from hybridremat.cli.figure_files import checked_files
from hybridremat.cli.inputs import limit_value, load, overhead_value, settings_given
from hybridremat.cli.output import print_json, stdout_to_stderr
from hybridremat.errors import LimitError, UsageError
from hybridremat.files import write_atomic
from hybridremat.planning.settings import FrontierSettings
from hybridremat.units import format_bytes, format_share_up, parse_overhead, resolve_limit


def run_frontier(options: Namespace) -> int:
    """Plan, measure if asked to, write the files, and print the frontier.

    Raises
    ------
    PlotError, MissingPackageError, OSError
        If a file cannot be written as its suffix says; nothing has been planned.
    LimitError
        If ``--measure`` is below 1, or the limit or the overhead cannot be read.
    InfeasibleLimitError
        If no plan keeps the limit and the overhead; no file is written.
    """
    if options.device_spec is not None and options.measure is not None:
        raise UsageError("--measure runs plans here; those of --device-spec are for another device")
    choice = _choice(options)
    outputs = checked_files(options.output)
    if options.measure is not None and options.measure < 1:
        raise LimitError(
            f"--measure {options.measure} is out of range: give a number ≥ 1 of plans to be measured"
        )
    target = load(options)
    step = target.model, target.args, target.kwargs
    with stdout_to_stderr(active=options.json):
        settings = settings_given(options, FrontierSettings.__optional_keys__)
        quiet, certify = options.quiet, options.certify
        frontier = make_frontier(*step, progress=not quiet, certify=certify, **settings)
        chosen = _chosen_row(frontier, choice)
        if options.measure is not None:
            frontier = frontier.measured(*step, count=options.measure)
    data = {**frontier.to_dict(), "chosen": chosen}
    for path in outputs:
        _write(frontier, path, choice, data)
    if options.json:
        print_json(data)
    else:
        sys.stdout.write(_text(frontier, chosen))
    return 0


def _choice(options: Namespace) -> dict[str, Any]:
    """The limit and the overhead that choose a point, checked before anything is planned."""
    choice: dict[str, Any] = {}
    if options.limit is not None:
        choice["memory_limit"] = limit_value(options.limit)
        resolve_limit(choice["memory_limit"], 1 << 40)
    if options.max_overhead is not None:
        choice["max_overhead"] = overhead_value(options.max_overhead)
        parse_overhead(choice["max_overhead"])
    return choice


def _chosen_row(frontier: Frontier, choice: dict[str, Any]) -> dict[str, Any] | None:
    """The row of the chosen point; None if none is asked for."""
    if not choice:
        return None
    return point_row(frontier.at(**choice), frontier)


def _write(frontier: Frontier, path: Path, choice: dict[str, Any], data: dict[str, Any]) -> None:
    suffix = path.suffix.lower()
    if suffix == ".csv":
        frontier.to_csv(path)
    elif suffix == ".json":
        write_atomic(path, json.dumps(data, indent=1) + "\n")
    else:
        frontier.plot(path, **choice)


def _text(frontier: Frontier, chosen: dict[str, Any] | None) -> str:
    if chosen is None:
        return f"{frontier}\n"
    peak = chosen["peak_bytes"]
    share = format_share_up(peak, frontier.plain_peak)
    return (
        f"{frontier}\nchosen: {format_bytes(peak)} ({peak} bytes, {share} of plain), "
        f"{chosen['overhead']:+.1%} time by cost model {frontier.cost_model}, "
        f"{chosen['extra_flops']:+.1%} flops\n"
    )

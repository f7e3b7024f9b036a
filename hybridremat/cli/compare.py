"""The command ``compare``: all strategies for one step, as a table, picture, rows or JSON."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from hybridremat.analysis.comparison import SHARES, TWENTIETHS, Comparison, compare
from hybridremat.api import frontier
from hybridremat.cli.figure_files import checked_files
from hybridremat.cli.inputs import limit_value, load, settings_given
from hybridremat.cli.output import print_json, stdout_to_stderr
from hybridremat.errors import UsageError
from hybridremat.files import write_atomic
from hybridremat.planning.settings import FrontierSettings
from hybridremat.units import resolve_limit


def run_compare(options: Namespace) -> int:
    """Plan with every strategy, write the files, and print the table.

    Raises
    ------
    PlotError, MissingPackageError, OSError
        If a file cannot be written as its suffix says; nothing has been planned.
    LimitError
        If a limit cannot be read.
    UsageError
        If a strategy is named, or both limits and ``--frontier`` are.
    """
    if options.strategy != "hybrid":
        raise UsageError("compare plans with every strategy: leave --strategy out")
    outputs = checked_files(options.output)
    if options.frontier and options.limit:
        raise UsageError("--limit and --frontier exclude each other: leave one of them out")
    shares = TWENTIETHS if options.frontier else SHARES
    limits = [limit_value(text) for text in options.limit or (f"{share}%" for share in shares)]
    known = [limit for limit in limits if limit is not None]
    for limit in known:
        resolve_limit(limit, 1 << 40)
    target = load(options)
    step = target.model, target.args, target.kwargs
    settings = settings_given(options, FrontierSettings.__optional_keys__ - {"strategy"})
    with stdout_to_stderr(active=options.json):
        found = compare(
            lambda name: frontier(*step, progress=not options.quiet, strategy=name, **settings),
            known_points=options.frontier,
            moves=options.offload is not None,
        )
    for path in outputs:
        _write(found, path, known)
    if options.json:
        print_json(found.to_dict(known))
    else:
        sys.stdout.write(found.text(known))
    return 0


def _write(found: Comparison, path: Path, limits: list[int | str]) -> None:
    suffix = path.suffix.lower()
    if suffix == ".csv":
        found.to_csv(path)
    elif suffix == ".json":
        write_atomic(path, json.dumps(found.to_dict(limits), indent=1) + "\n")
    else:
        found.plot(path)

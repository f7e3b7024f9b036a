"""The command ``batch``: the largest batch that fits a limit, and what it costs.

Only argparse loads here; torch loads when the command runs.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace

from hybridremat.command_values import limit_value, overhead_value
from hybridremat.errors import TargetError, UsageError


def add_batch_options(parser: ArgumentParser) -> None:
    """What ``batch`` takes beside the target and how it is planned."""
    add = parser.add_argument
    add("--limit", metavar="SIZE", help="most step memory: 6GiB or 6442450944")
    add("--max-overhead", metavar="SHARE", help="most extra time against the plain step of that batch")
    add("--reserve", metavar="SIZE", default="0", help="bytes of the limit kept free for your own code")
    add("--start", type=int, default=1, metavar="N", help="the batch to try first (default: 1)")
    add("--most", type=int, default=65536, metavar="N", help="the largest batch to try (default: 65536)")
    add("-o", "--output", metavar="FILE", help="write the plan of that batch as JSON to this file")


def run_batch(options: Namespace) -> int:
    """Search, write the plan if a file is named, and print the batch.

    Raises
    ------
    TargetError
        Without a limit, or if the function takes no argument ``batch``.
    HybridRematError
        As :func:`hybridremat.max_batch_size`.
    """
    from hybridremat.batch_search import max_batch_size
    from hybridremat.command_input import load, shared_settings
    from hybridremat.command_output import require_writable
    from hybridremat.plan_file import write_plan
    from hybridremat.talking import results_apart

    limit = limit_value(options.limit)
    if limit is None:
        raise TargetError(f"say what the batches of {options.target} are to fit: --limit 6GiB")

    if options.device_spec is not None:
        raise UsageError("--device-spec: the search for a batch measures kernels here; use plan or frontier")

    def made(batch: int) -> tuple[object, ...]:
        target = load(options, batch=batch)
        return target.model, target.args, target.kwargs

    require_writable(options.output)
    with results_apart(active=options.json):
        found = max_batch_size(
            made,
            limit,
            start=options.start,
            most=options.most,
            max_overhead=overhead_value(options.max_overhead),
            reserve=options.reserve,
            progress=not options.quiet,
            **shared_settings(options),
        )
    if options.output is not None:
        write_plan(found.plan, options.output)
    sys.stdout.write((json.dumps(found.to_dict(), indent=1) if options.json else str(found)) + "\n")
    return 0

"""The command ``batch``: the largest batch that fits a limit, and what it costs."""

from __future__ import annotations

import sys
from argparse import Namespace

from hybridremat.analysis.batch_search import max_batch_size
from hybridremat.cli.inputs import limit_value, load, settings_given
from hybridremat.cli.output import print_json, require_writable, stdout_to_stderr
from hybridremat.errors import TargetError
from hybridremat.planning.settings import BatchSettings
from hybridremat.plans.codec import write_plan


def run_batch(options: Namespace) -> int:
    """Search, write the plan if a file is named, and print the result.

    Raises
    ------
    TargetError
        Without a limit, or if the function takes no argument ``batch``.
    HybridRematError
        As :func:`hybridremat.max_batch_size`.
    """
    limit = limit_value(options.limit)
    if limit is None:
        raise TargetError(f"give the memory limit that batches of {options.target} must fit: --limit 6GiB")

    def made(batch: int) -> tuple[object, ...]:
        target = load(options, batch=batch)
        return target.model, target.args, target.kwargs

    require_writable(options.output)
    with stdout_to_stderr(active=options.json):
        found = max_batch_size(
            made,
            limit,
            start=options.start,
            most=options.most,
            progress=not options.quiet,
            **settings_given(options, BatchSettings.__optional_keys__),
        )
    if options.output is not None:
        write_plan(found.plan, options.output)
    if options.json:
        print_json(found.to_dict())
    else:
        sys.stdout.write(f"{found}\n")
    return 0

"""The command ``fit``: whether training fits a device, and at which limit."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from hybridremat.analysis.fit import fit
from hybridremat.cli.inputs import limit_value, load, settings_given
from hybridremat.cli.output import print_json, stdout_to_stderr
from hybridremat.cli.targets import takes_argument
from hybridremat.errors import UsageError
from hybridremat.planning.settings import BatchSettings
from hybridremat.plans.fsdp import Fsdp


def run_fit(options: Namespace) -> int:
    """Add everything up, print the answer, and return 1 if nothing fits.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.fit`.
    """

    def made(batch: int) -> tuple[Any, ...]:
        sample = load(options, batch=batch)
        return sample.model, sample.args, sample.kwargs

    target = load(options)
    given = any(text.partition("=")[0].strip() == "batch" for text in options.sets)
    spread = options.gpus is not None or options.shard is not None
    search = not (options.no_batch or given or spread) and takes_argument(options.target, "batch")
    with stdout_to_stderr(active=options.json):
        found = fit(
            target.model,
            target.args,
            target.kwargs,
            optimizer=options.optimizer,
            memory=limit_value(options.memory),
            margin=limit_value(options.margin),
            make_batch=made if search else None,
            most=options.most,
            progress=not options.quiet,
            gpus=options.gpus,
            shard=options.shard,
            link=options.link,
            microbatches=options.microbatches,
            **_settings(options),
        )
    if options.json:
        print_json(found.to_dict())
    else:
        sys.stdout.write(f"{found}\n")
    return 1 if found.fits == "no" else 0


def _settings(options: Namespace) -> dict[str, Any]:
    """Those of the options, and the dtypes of FSDP2."""
    settings = settings_given(options, BatchSettings.__optional_keys__)
    dtypes = {"param_dtype": options.param_dtype, "reduce_dtype": options.reduce_dtype}
    if any(dtypes.values()):
        if options.gpus is None or options.shard != "fsdp2":
            raise UsageError("--param-dtype and --reduce-dtype are FSDP2's: give --gpus N --shard fsdp2 too")
        settings["fsdp"] = Fsdp(options.gpus, **dtypes)
    return settings

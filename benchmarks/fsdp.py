"""Units planned under FSDP2 beside checkpoints around them: bytes of one of two ranks, and extra flops.

    python benchmarks/fsdp.py [--models WORD …] [--pages]

One process with PyTorch's fake process group: collectives do nothing, and bytes are those of one rank above
its sharded parameters, as PyTorch's profiler measures them. Each layer is a unit. Checkpoints are
``checkpoint_wrapper`` around each of them. Rows go to ``data/fsdp.csv``, the table to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from generated import Row, circumstances, days, in_a_process, read_rows, versions, write_part, write_rows

SCRIPT: Final = "fsdp.py"
ROWS: Final = Path(__file__).with_name("data") / "fsdp.csv"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
RANKS: Final = 2
MODELS: Final = {
    "gpt2": ("transformer.h.*", {"n_layer": 6}),
    "llama": ("model.layers.*", {"num_hidden_layers": 6}),
    "bert": ("bert.encoder.layer.*", {"num_hidden_layers": 6}),
    "vit": ("vit.layers.*", {}),
    "t5": (("encoder.block.*", "decoder.block.*"), {}),
}
COLUMNS: Final = (
    *("model", "plain", "checkpoint", "checkpoint_flops", "ours_there", "ours_flops", "least", "least_flops"),
    *("date", "torch", "load"),
)


def measured(name: str) -> Row:
    """The row of one model; each plan in a process of its own."""
    found = in_a_process(__file__, "--here", name)
    plain, checkpoint = found["plain"], found["checkpoint"]
    row: Row = {"model": name, "plain": plain[0], "checkpoint": checkpoint[0]}
    row["checkpoint_flops"] = extra(checkpoint[1], plain[1])
    for column, limit in (("ours_there", checkpoint[0]), ("least", 1)):
        peak, flops = in_a_process(__file__, "--here", name, "--limit", str(limit))["planned"]
        row[column], row[column.removesuffix("_there") + "_flops"] = peak, round(100 * flops, 2)
    return row | circumstances(os.getloadavg()[0])


def extra(flops: int, plain: int) -> float:
    """Percent of flops beyond the plain step's."""
    return round(100 * (flops / plain - 1), 2)


def here(name: str, limit: int | None) -> dict[str, tuple[int, float]]:
    """Of a model, in this process: peak bytes and flops plain and checkpointed, or, planned, extra flops."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    if limit is not None:
        return {"planned": planned(name, limit)}
    plain = stepped(*made(name))
    model, batch, units = made(name)
    checkpointed(model, units)
    return {"plain": plain, "checkpoint": stepped(model, batch, units)}


def made(name: str) -> tuple[Any, dict[str, Any], list[str]]:
    """A model, its batch and the names of its units."""
    import torch

    from hybridremat.compiler.units import find_units
    from hybridremat.zoo.models import reference_model

    patterns, changes = MODELS[name]
    torch.manual_seed(0)
    model, batch = reference_model(name, changes=changes)
    wanted = (patterns,) if isinstance(patterns, str) else patterns
    return model.train(), batch, list(find_units(model, wanted))


def checkpointed(model: Any, units: list[str]) -> None:
    """Put a checkpoint around each unit."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for unit in units:
        model.set_submodule(unit, checkpoint_wrapper(model.get_submodule(unit)))


def stepped(model: Any, batch: dict[str, Any], units: list[str]) -> tuple[int, int]:
    """Peak bytes of the second step of a model that is sharded by its units, and the flops of the third.

    Under a counter of flops a planned model runs as it is.
    """
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.utils.flop_counter import FlopCounterMode

    from hybridremat.graph.costs.allocations import record
    from hybridremat.graph.garbage import without_collection

    for unit in units:
        fully_shard(model.get_submodule(unit))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(_: object = None) -> None:
        output = model(**batch)
        loss = output["loss"] if isinstance(output, dict) else output.loss
        del output
        loss.backward()

    step()
    optimizer.step()
    optimizer.zero_grad()
    with without_collection():
        peak = record("cpu", step).peak
    optimizer.zero_grad()
    with FlopCounterMode(display=False) as flops:
        step()
    return peak, flops.get_total_flops()


def planned(name: str, limit: int) -> tuple[int, float]:
    """Peak bytes and extra flops (a fraction) of a model whose units are planned under a limit in bytes."""
    import warnings

    import hybridremat

    model, batch, units = made(name)
    how = {"cost_model": "flops", "workers": 1, "progress": False, "cache": False, "across_ranks": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hybridremat.InfeasibleLimitWarning)
        hybridremat.wrap_each(
            model, units, kwargs=batch, memory_limit=limit, fsdp=RANKS, on_infeasible="least", **how
        )
    plan = hybridremat.get_plan(model)
    assert plan is not None
    peak, _ = stepped(model, batch, units)
    assert peak <= plan.predicted_peak, f"{name}: {peak} bytes, and {plan.predicted_peak} planned"
    return peak, plan.extra_flops


def part() -> str:
    """What the script writes into the page."""
    found = read_rows(ROWS)
    return "\n".join((described(found), "", *table(found)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the table."""
    return (
        f"`python benchmarks/fsdp.py`: {days(rows)}, {versions(rows)}, one thread, cost model `flops`, one "
        f"of {RANKS} ranks with PyTorch's fake process group, above its sharded parameters. *There*: planned "
        "for the peak of checkpoints around each layer."
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Peaks and extra flops by model."""
    titles = "plain FSDP2", "checkpoints", "extra flops", "there", "extra flops", "least", "extra flops"
    yield f"| model | {' | '.join(titles)} |"
    yield "|" + "---|" * 8
    for row in rows:
        peaks = [mib(row[name]) for name in ("plain", "checkpoint", "ours_there", "least")]
        flops = [f"{row[name]} %" for name in ("checkpoint_flops", "ours_flops", "least_flops")]
        cells = (peaks[0], *(each for pair in zip(peaks[1:], flops, strict=True) for each in pair))
        yield f"| {row['model']} | {' | '.join(cells)} |"


def mib(number: str) -> str:
    """Bytes as MiB."""
    return f"{int(number) / 2**20:.1f} MiB"


def main() -> None:
    """Measure the models asked for and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", help="those whose names hold one of these words; else all")
    parser.add_argument("--pages", action="store_true", help="only write the page from the rows")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(here(options.here, options.limit)))
        return
    wanted = [name for name in MODELS if not options.models or any(word in name for word in options.models)]
    for name in [] if options.pages else wanted:
        kept = {row["model"]: row for row in (*read_rows(ROWS), measured(name))}
        write_rows(ROWS, COLUMNS, [kept[each] for each in MODELS if each in kept])
        print(f"{name}: measured", file=sys.stderr)
    write_part(PAGE, SCRIPT, part())


if __name__ == "__main__":
    main()

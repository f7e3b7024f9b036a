"""Losses by chunks of rows beside plain PyTorch: peaks, times, and how near gradients are to float64.

    python benchmarks/chunked.py [NAME …] [--pages]

NAME is one of :data:`CASES` or :data:`REFERENCE_MODELS`. Rows go to ``data/chunked.csv`` as they come, what
is missing without NAME, and those of NAME anew; the tables from them to docs/benchmarks.md; ``--pages`` does
only that. Rows without a load are those of 2026-11-22, taken over from the page as it stood.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from chunked_cases import BATCH, CASES, LENGTH, PAIRS, of_case
from generated import Row, circumstances, days, gone_on, loads, older_day, task_options, versions, write_part
from marks import DATA, recorded_frontier
from reference import PAGE, made, title

import hybridremat

SCRIPT: Final = "chunked.py"
ROWS: Final = DATA / "chunked.csv"
COLUMNS: Final = (
    *("model", "plain", "fastest", "least", "in_backward", "exact", "time", "error"),
    *("load", "date", "torch"),
)
OLDER: Final = " Rows of an earlier day say so; they are of wall time, beside other work."
REFERENCE_MODELS: Final = ("llama", "gpt2", "gpt2_0.1", "bert", "t5")


def of_reference(name: str) -> Row:
    """Of a reference model that returns its loss alone: peaks in bytes, by flops."""
    model, batch = made(name)
    how: dict[str, Any] = {"kwargs": batch, "outputs": "loss", "cost_model": "flops", "progress": False}
    chunked = hybridremat.frontier(model, rewrites="chunked", **how)
    early = hybridremat.frontier(model, rewrites="chunked", gradients="in_backward", **how)
    exact = hybridremat.frontier(model, **how)
    return {
        "plain": recorded_frontier(name)[0],
        "fastest": _without_extra(chunked),
        "least": chunked.least.peak,
        "in_backward": early.least.peak,
        "exact": _without_extra(exact),
    }


def _without_extra(found: hybridremat.Frontier) -> int:
    """The least peak at no extra flops."""
    return min(point.peak for point in found.points if point.extra_flops == 0)


def measured(name: str) -> list[Row]:
    """The row of one model, made in this process."""
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    row = of_case(name) if name in CASES else of_reference(name)
    return [{"model": name, **row, **circumstances(load)}]


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    by_name = {row["model"]: row for row in rows}
    references, cases = (
        [by_name[name] for name in names if name in by_name] for names in (REFERENCE_MODELS, CASES)
    )
    return "\n".join((*reference_table(references), "", *case_table(cases)))


def reference_table(rows: Sequence[Row]) -> Iterator[str]:
    """Least peaks of reference models."""
    yield (
        f'`python benchmarks/chunked.py`: `rewrites="chunked"`, loss alone, {_circumstances(rows)}, cost '
        "model `flops`, shares of plain eager as above: least peak (in the backward), and the least peak at "
        'no extra flops beside that with `rewrites="exact"`.\n'
    )
    yield "| model | least | in the backward | no extra flops | exact, no extra flops |"
    yield "|---|---|---|---|---|"
    for row in rows:
        sizes = (int(row[each]) for each in ("least", "in_backward", "fastest", "exact"))
        figures = (size / int(row["plain"]) for size in sizes)
        yield f"| {title(row['model'])} | {' | '.join(f'{100 * each:.1f} %' for each in figures)} |"


def case_table(rows: Sequence[Row]) -> Iterator[str]:
    """Language models with large vocabularies."""
    measured = [row for row in rows if row["load"]] or rows
    older = "" if len(measured) == len(rows) else OLDER
    yield (
        f"Language models of two layers of width 128 and vocabularies of real size, {BATCH} × {LENGTH} "
        f"tokens, {_circumstances(measured)}; peaks in MiB. *Fastest* and *least* are plans with the loss by "
        f"chunks; times are CPU times, medians of {PAIRS} pairs beside plain PyTorch; *error* is the most, "
        f"over parameters, that a gradient is farther from a float64 run's than the plain one.{older}\n"
    )
    yield (
        "| case | computes in | logits | plain | fastest | least | `exact`, least | time / plain "
        "| error / plain |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        name, case = row["model"], CASES[row["model"]]
        logits = BATCH * LENGTH * case.settings["vocab_size"] * 4
        sizes = (logits, *(int(row[each]) for each in ("plain", "fastest", "least", "exact")))
        cells = [name + older_day(row), case.kind, *(f"{size / 2**20:.0f}" for size in sizes)]
        yield f"| {' | '.join(cells)} | {float(row['time']):.2f} | {float(row['error']):.2f} |"


def _circumstances(rows: Sequence[Row]) -> str:
    return f"{days(rows)}, {versions(rows)}, one thread, 2 cores with {loads(rows)}"


def main() -> None:
    """Measure what is asked for, write the page."""
    options = task_options(__doc__, (*REFERENCE_MODELS, *CASES))
    if options.here:
        print(json.dumps(measured(*options.here)))
        return
    tasks = [(name,) for name in options.names]
    write_part(PAGE, SCRIPT, part(gone_on(__file__, ROWS, COLUMNS, tasks, again=options.again)))


if __name__ == "__main__":
    main()

"""The exact program beside CP-SAT on every distinct block of the reference models.

    python benchmarks/block_solvers.py [MODEL …] [--pages]

Options, CPU seconds and proven share of both, block by block, into ``data/block_solvers.csv``; from it the
table of docs/method.md is written (``--pages``: that alone). Blocks are those of all block sizes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from generated import Row, read_rows, write_part, write_rows
from marks import DATA, recorded_models
from rich.console import Console
from stock_inductor import subject

import hybridremat
from hybridremat.blocks.pareto import enumerate_options, is_solved_exactly
from hybridremat.blocks.types import BlockProblem, OptionSet

RECORDS = DATA / "block_solvers.csv"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "method.md"
COLUMNS = (
    *("model", "block", "ops", "auto", "solver"),
    *("options", "seconds", "solves", "unproved"),
)



def distinct_blocks(model: str) -> list[BlockProblem]:
    """The distinct blocks of all chains of a model, the smallest first; a whole planning, for that."""
    made, batch = subject(model)
    how: dict[str, Any] = {"kwargs": batch, "cost_model": "flops", "strategy": "plain", "progress": False}
    chains = hybridremat.frontier(made, **how)._step_frontier.chains  # type: ignore[union-attr]
    problems = (binding.problem for chain in chains for binding in chain.bindings)
    return sorted(dict.fromkeys(problems), key=lambda each: (len(each.ops), len(each.steps)))


def rows_of(model: str) -> Iterator[Row]:
    """Two rows for each block, or one where the exact program cannot hold it."""
    for number, problem in enumerate(distinct_blocks(model)):
        about = {"model": model, "block": number, "ops": len(problem.ops)}
        about["auto"] = "exact" if is_solved_exactly(problem) else "cp-sat"
        for solver in ("exact", "cp-sat"):
            if solver == "exact" and not is_solved_exactly(problem, solver="exact"):
                continue
            started = time.process_time()
            found = enumerate_options(problem, solver=solver)  # type: ignore[arg-type]
            seconds = round(time.process_time() - started, 2)
            yield about | {"solver": solver, "seconds": seconds} | figures(found)


def figures(found: OptionSet) -> Row:
    """What is told of the options of a block."""
    return {
        "options": len(found.options) + len(found.solo),
        "solves": found.solves,
        "unproved": found.unproved,
    }


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each model: what both found on the blocks that both can hold, and CP-SAT on the others."""
    titles = ("model", "blocks, ops", "exact", "CP-SAT there", "beyond exact", "CP-SAT there")
    yield "| " + " | ".join(titles) + " |"
    yield "|---|---|---|---|---|---|"
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        exact = [row for row in own if row["solver"] == "exact"]
        held = {row["block"] for row in exact}
        both = [row for row in own if row["solver"] == "cp-sat" and row["block"] in held]
        alone = [row for row in own if row["solver"] == "cp-sat" and row["block"] not in held]
        ops = [int(row["ops"]) for row in own]
        beyond = _sums(alone, proven=True) if alone else ""
        cells = (
            model,
            f"{len(held) + len(alone)}, {min(ops)} to {max(ops)}",
            _sums(exact, proven=False),
            _sums(both, proven=True),
            str(len(alone)),
            beyond,
        )
        yield "| " + " | ".join(cells) + " |"


def _sums(rows: Sequence[Row], *, proven: bool) -> str:
    options, solves, unproved = (sum(int(r[k]) for r in rows) for k in ("options", "solves", "unproved"))
    text = f"{options:,}, {sum(float(row['seconds']) for row in rows):.0f}"
    return text + (f", {100 * (1 - unproved / max(1, solves)):.0f} %" if proven else "")


def main() -> None:
    """Solve, keep the rows and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--pages", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows(RECORDS)
    for model in () if options.pages else options.models or recorded_models():
        rows = [row for row in rows if row["model"] != model]
        rows += list(rows_of(model))
        write_rows(RECORDS, COLUMNS, rows)
        Console(stderr=True).print(f"{model}: done")
    write_part(PAGE, Path(__file__).name, "\n".join(table(rows)))


if __name__ == "__main__":
    main()

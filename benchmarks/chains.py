"""The chain program alone: CPU seconds and memory of its table, and of finding decisions again.

    python benchmarks/chains.py [BLOCKS:KINDS …] [--repeats N] [--pages]

A chain of BLOCKS random blocks of KINDS kinds with 60 options each, like transformer layers'. Each is
measured in processes of its own, on one core, and the least time counts. Rows go to ``data/chains.csv``, the
table from them to docs/benchmarks.md; ``--pages`` does only that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
from generated import Row, in_a_process, loads, read_rows, write_part, write_rows

from hybridremat.sequence.backtrack import Backtracker
from hybridremat.sequence.chain_problem import BlockFigures, ChainProblem, OptionFigures, SoloFigures
from hybridremat.sequence.dynamic_program import chain_table

SCRIPT: Final = "chains.py"
ROWS: Final = Path(__file__).with_name("data") / "chains.csv"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
COLUMNS: Final = ("chain", "table", "decisions", "points", "MiB", "load", "date", "numpy")
CHAINS: Final = ("100:1", "100:100", "300:300", "1000:1", "1000:2")
OPTIONS: Final = 60
LIMITS: Final = 64
"""About as many limits have their decisions found."""


def random_block(random: np.random.Generator) -> BlockFigures:
    """A block of about a transformer layer's figures, with options from all saved to little saved."""
    forward, whole, temporary = (int(random.integers(low, 2 * low)) for low in (10**6, 16 * 2**20, 2**20))
    shares = np.sort(random.uniform(0.1, 1, OPTIONS))[::-1]
    times = np.sort(random.uniform(0, 1, OPTIONS))
    figures = tuple(
        OptionFigures(
            saved=int(whole * share),
            forward_peak=int(whole * share) + temporary,
            backward_peak=int(whole * (share + 0.3 * recomputed)) + 2 * temporary,
            time=int(forward * recomputed**2),
        )
        for share, recomputed in zip(shares, times, strict=True)
    )
    solo = (SoloFigures(whole + 3 * temporary, forward), SoloFigures(whole // 2, int(1.5 * forward)))
    return BlockFigures(figures, solo, forward, 2**20)


def random_chain(blocks: int, kinds: int) -> ChainProblem:
    """A chain whose boundaries are one value each; kinds take turns."""
    random = np.random.default_rng(0)
    every = [random_block(random) for _ in range(kinds)]
    figures = tuple(every[i % kinds] for i in range(blocks))
    boundary = tuple(tuple(2**21 * (j > s) for j in range(blocks + 1)) for s in range(blocks))
    return ChainProblem(
        blocks=figures,
        boundary_bytes=boundary,
        gradient_bytes=(0, *(2**21,) * (blocks - 1), 0),
        later_gradients=tuple(2**20 * (blocks - 1 - t) for t in range(blocks)),
        plain_peak=tuple(tuple(2**21 * (k > s) + 2**22 for k in range(blocks)) for s in range(blocks)),
        tangent_bytes=4,
    )


def measured(chain: str) -> Row:
    """The figures of one chain, in this process."""
    blocks, kinds = map(int, chain.split(":"))
    load = os.getloadavg()[0]
    problem = random_chain(blocks, kinds)
    memory = sum(block.options[0].saved for block in problem.blocks) + 2**24
    started = time.process_time()
    table = chain_table(problem, memory=memory)
    filled = time.process_time()
    slots = table.breakpoints()
    slots = slots[:: max(1, len(slots) // LIMITS)]
    backtrack = Backtracker(table)
    for slot in slots:
        backtrack(slot)
    return {
        "chain": chain,
        "table": round(filled - started, 2),
        "decisions": round(time.process_time() - filled, 2),
        "points": len(slots),
        "MiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "load": round(load, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "numpy": np.__version__,
    }


def best_of(chain: str, repeats: int) -> Row:
    """The figures of one chain: of several runs that of the least time."""
    rows: list[Row] = [in_a_process(__file__, "--here", chain) for _ in range(repeats)]
    return min(rows, key=lambda row: float(row["table"]))


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *table_of(rows)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the table."""
    return (
        f"`python benchmarks/chains.py`: CPU seconds, the least of three runs, "
        f"{max(row['date'] for row in rows)}, numpy {rows[-1]['numpy']}, one core with {loads(rows)}, "
        f"{OPTIONS} options a block. "
        "*Decisions* is the time to find them again at so many limits, *memory* the most of the process."
    )


def table_of(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    yield "| blocks | of them different | table | decisions | memory |"
    yield "|---|---|---|---|---|"
    for row in rows:
        blocks, kinds = row["chain"].split(":")
        decisions = f"{float(row['decisions']):.1f} s at {row['points']}"
        yield f"| {blocks} | {kinds} | {float(row['table']):.1f} s | {decisions} | {row['MiB']} MiB |"


def main() -> None:
    """Measure the chains asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("chains", nargs="*", help="blocks and kinds of them, 300:300")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(options.here)))
        return
    rows = {row["chain"]: row for row in read_rows(ROWS)}
    for chain in () if options.pages else options.chains or CHAINS:
        rows[chain] = best_of(chain, options.repeats)
    kept = sorted(rows.values(), key=lambda row: [int(n) for n in row["chain"].split(":")])
    write_rows(ROWS, COLUMNS, kept)
    write_part(PAGE, SCRIPT, part(kept))


if __name__ == "__main__":
    main()

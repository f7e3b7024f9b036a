"""What further input lengths take from one capture, and how good the schedules are that they share.

    python benchmarks/sizes.py [LIMIT …] [--pages]

GPT-2 of 12 layers with dropout, one thread, cost model ``flops``, each limit (a share of the longest step's
memory) in a process of its own. Rows go to ``data/sizes.csv``, the table from them to docs/benchmarks.md;
``--pages`` does only that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from generated import Row, read_rows, write_part, write_rows
from rich.console import Console

SCRIPT: Final = "sizes.py"
CHILD: Final = Path(__file__).with_name("sizes_child.py")
ROWS: Final = Path(__file__).with_name("data") / "sizes.csv"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
FIGURES: Final = (
    "seconds", "captures", "schedules", "overhead", "own_seconds", "own_overhead", "step", "static_step",
)  # fmt: skip
COLUMNS: Final = ("limit", "length", *FIGURES, "load", "date", "torch")
LIMITS: Final = ("40%", "60%", "80%", "100%")
LENGTHS: Final = (512, 448, *random.Random(0).sample([n for n in range(64, 512) if n != 448], 12))
"""The first one is captured as it is, the second one for all lengths; then those that follow, at random."""


def measured(limit: str) -> list[Row]:
    """Rows of all lengths under a limit, kernels unknown at first."""
    command = [sys.executable, str(CHILD), "gpt2", json.dumps({"n_layer": 12}), limit, json.dumps(LENGTHS)]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HYBRIDREMAT_CACHE": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{limit}: {done.stderr[-2000:]}")
    told = {
        "load": round(load, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
    }
    found = json.loads(done.stdout.splitlines()[-1])
    return [
        {"limit": limit, "length": length}
        | {name: round(row[name], 5) if name in row else "" for name in FIGURES}
        | told
        for length, row in zip(LENGTHS[1:], found, strict=True)
    ]


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of further lengths: those with a known schedule, and with a new one."""
    same, new = [], []
    for before, row in pairwise(rows):
        (same if row["schedules"] == before["schedules"] else new).append(row)
    return same, new


def median(rows: Sequence[Row], name: str) -> str:
    """The median of a figure in seconds, and of how many lengths."""
    if not rows:
        return "–"
    return f"{statistics.median(float(row[name]) for row in rows):.2f} s ({len(rows)})"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    yield (
        "| limit | the capture for all lengths | a length, known schedule | a length, new schedule | "
        "a plan of its own | captures, schedules | overhead above its own: median, most | step: static's |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for limit in (each for each in LIMITS if any(row["limit"] == each for row in rows)):
        mine = [row for row in rows if row["limit"] == limit]
        same, new = split(mine)
        above = [100 * (float(row["overhead"]) - float(row["own_overhead"])) for row in mine]
        steps = [float(row["step"]) / float(row["static_step"]) for row in mine if row["step"] != ""]
        cells = (
            limit,
            f"{float(mine[0]['seconds']):.1f} s",
            median(same, "seconds"),
            median(new, "seconds"),
            f"{statistics.median(float(row['own_seconds']) for row in mine[1:]):.1f} s",
            f"{mine[-1]['captures']}, {mine[-1]['schedules']}",
            f"{statistics.median(above):.2f}, {max(above):.2f} points",
            f"{statistics.median(steps):.3f}" if steps else "–",
        )
        yield "| " + " | ".join(cells) + " |"


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    loads = [float(row["load"]) for row in rows]
    above = (
        f"`python benchmarks/sizes.py`: GPT-2 of 12 layers with dropout 0.1, batch 2, {len(LENGTHS)} lengths "
        f"from {min(LENGTHS)} to {max(LENGTHS)}, `dynamic=None`, cost model `flops`, {rows[-1]['date']}, "
        f"torch {rows[-1]['torch']}, one thread, 2 cores with a load of {min(loads):.1f} to "
        f"{max(loads):.1f}. The limit is that share of the longest step's memory, in bytes the same for all. "
        "CPU seconds of planning, median (number of lengths); a plan of its own is captured and searched for "
        "one length under the same limit, with kernels that are known, and is not built; a step is the "
        "median of pairs, wall time."
    )
    return "\n".join((above, "", *table(rows)))


def main() -> None:
    """Measure the limits asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("limits", nargs="*", help=f"of {', '.join(LIMITS).replace('%', '%%')}")
    parser.add_argument("--pages", action="store_true")
    options = parser.parse_args()
    rows, console = (read_rows(ROWS) if ROWS.exists() else []), Console(stderr=True)
    for limit in () if options.pages else options.limits or LIMITS:
        rows = [row for row in rows if row["limit"] != limit] + measured(limit)
        write_rows(ROWS, COLUMNS, rows)
        console.print("\n".join(table([row for row in rows if row["limit"] == limit])))
    write_part(PAGE, SCRIPT, part(rows))


if __name__ == "__main__":
    main()

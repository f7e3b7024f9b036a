"""Cases that users reported against PyTorch, beside ours: peaks of the same steps, as measured.

    python benchmarks/reported.py [--pages]

pytorch#197838: with a lower ``activation_memory_budget`` the peak rises again. Here on the reference models,
op by op (as the backend ``aot_eager_decomp_partition``) and compiled, beside ours under falling limits, from
the rows of ``peers.py``. pytorch#193193: two traversals of checkpointed blocks in one compiled graph
(:mod:`reported_cases`). Each row is a process of its own, one thread; they are kept in ``data/reported.csv``,
and the part of docs/benchmarks.md is written from them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import peers
import torch
from generated import Row, read_rows, write_part, write_rows
from marks import DATA
from peers_methods import OpByOp
from reported_cases import Traversals, traversals_batch
from stock_inductor import Compiler
from torch import nn

import hybridremat

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
SCRIPT = "reported.py"
ROWS = DATA / "reported.csv"
COLUMNS = ("case", "way", "setting", "peak_bytes", "limit_bytes", "extra_flops_percent", "date", "torch")

HOW: dict[str, Any] = {"cost_model": "flops", "workers": 1, "progress": False}
WAYS = {"partition": "budget, op by op", "inductor": "budget, Inductor", "hybrid": "ours, limit"}
WHICH = ("both", "first", "second")


def traversals() -> Iterator[Row]:
    """Rows of pytorch#193193."""
    for which in WHICH:
        checkpointed = child("checkpoint", which, "")
        yield checkpointed
        for way in ("partition", "inductor"):
            yield child(f"checkpoint, {way}", which, "")
        if which == "both":
            yield child("plain", which, "")
            yield child("checkpoint, inductor, graph break", which, "")
        yield child("hybrid", which, str(checkpointed["peak_bytes"]))


def child(way: str, which: str, limit: str) -> Row:
    """The row of one process."""
    command = [sys.executable, __file__, "--child", way, which, limit]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    case = {"case": "two traversals", "way": way, "setting": which}
    if done.returncode:
        return {**case, "peak_bytes": f"failed: {peers.reason(done.stderr)}"}
    return {**case, **json.loads(done.stdout.splitlines()[-1])}


def measured(way: str, which: str, limit: str) -> Row:
    """The peak of one way to train :class:`reported_cases.Traversals`, in this process."""
    torch.set_num_threads(1)
    kind, *more = way.split(", ")
    model: nn.Module = Traversals(which, checkpointed=kind == "checkpoint", broken="graph break" in more)
    batch = traversals_batch()
    if kind == "hybrid":
        model = hybridremat.wrap(model, kwargs=batch, memory_limit=int(limit), **HOW)
    elif more:
        model.compile(backend=OpByOp(decomposed=True) if "partition" in more else Compiler())
    found = hybridremat.measure(model, kwargs=batch, repeats=1)
    plan = hybridremat.get_plan(model) if kind == "hybrid" else None
    extra = round(100 * plan.extra_flops, 3) if plan is not None else ""
    return {"peak_bytes": found.peak, "limit_bytes": limit, "extra_flops_percent": extra}


def is_monotone(peaks: Sequence[int]) -> bool:
    """Whether no peak is above one before."""
    return all(later <= earlier for earlier, later in pairwise(peaks))


def budget_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table of pytorch#197838: a line for each model of the rows of ``peers.py``."""
    yield "| model | way | peaks, from the highest budget or limit down | falls throughout |"
    yield "|---|---|---|---|"
    for model in dict.fromkeys(row["model"] for row in rows if row["device"] == "cpu"):
        own = [row for row in rows if (row["model"], row["device"]) == (model, "cpu") and row["peak_bytes"]]
        plain = next(int(row["peak_bytes"]) for row in own if row["method"] == "eager")
        for way, title in WAYS.items():
            some = [row for row in own if row["method"] == way]
            some.sort(key=lambda row: -float(row["setting"]))
            peaks = [int(row["peak_bytes"]) for row in some]
            if peaks:
                shares = " ".join(f"{100 * peak / plain:.1f}" for peak in peaks)
                yield f"| {model} | {title} | {shares} | {'yes' if is_monotone(peaks) else '**no**'} |"


def traversal_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table of pytorch#193193."""
    own = [row for row in rows if row["case"] == "two traversals"]
    yield "| step | both traversals | the first alone | the second alone |"
    yield "|---|---|---|---|"
    known = {(row["way"], row["setting"]): row for row in own}
    for way in dict.fromkeys(row["way"] for row in own):
        bases = [int(known["checkpoint", which]["peak_bytes"]) for which in WHICH]
        cells = [cell(known.get((way, which)), base) for which, base in zip(WHICH, bases, strict=True)]
        named = "ours, under the first line's peak" if way == "hybrid" else way
        yield f"| {named} | " + " | ".join(cells) + " |"


def cell(row: Row | None, base: int) -> str:
    """A peak as a multiple of the checkpointed step's."""
    if row is None:
        return ""
    if row["peak_bytes"].startswith("failed"):
        return str(row["peak_bytes"])
    text = f"{int(row['peak_bytes']) / base:.2f} ×"
    return text + (f", {float(row['extra_flops_percent']):.1f} %" if row["extra_flops_percent"] else "")


def write_page(rows: Sequence[Row]) -> None:
    """The part of docs/benchmarks.md between its marks."""
    when = f"{rows[0]['date']}, torch {rows[0]['torch']}, 2 cores of a shared machine, one thread."
    lines = [*budget_lines(read_rows(DATA / "peers.csv")), "", when, "", *traversal_lines(rows)]
    write_part(PAGE, SCRIPT, "\n".join(lines).rstrip())


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(*options.child)))
        return
    if not options.pages:
        about = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__}
        empty = dict.fromkeys(COLUMNS, "")
        rows: list[Row] = []
        for row in traversals():
            rows.append(empty | row | about)
            write_rows(ROWS, COLUMNS, rows)
            print(row, file=sys.stderr, flush=True)
    write_page(read_rows(ROWS))


if __name__ == "__main__":
    main()

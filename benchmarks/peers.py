"""Every way to train in less memory that people use today, beside ours: rows, and from them tables, plots.

    python benchmarks/peers.py [MODEL …] [--methods NAME …] [--device cuda] [--fresh] [--pages]

Each way is measured in a process of its own, one thread, and its row is written as it comes: what is there
already is not measured again, unless ``--fresh`` asks for it. Then docs/benchmarks.md and the plots are
written from the rows; ``--pages`` does only that. Our plans are measured at the peak of each peer.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from generated import Row, read_rows, write_rows
from marks import DATA, recorded_models
from peers_methods import METHODS, OURS
from peers_pages import write_pages
from rich.console import Console

from hybridremat.sequence.strategies import STRATEGIES

CHILD = Path(__file__).with_name("peers_child.py")
PAIRS = 9
MOST = 200
"""Characters of an error in a table."""
COLUMNS = (
    *("model", "method", "setting", "device"),
    *("peak_bytes", "predicted_bytes", "flops", "extra_flops_percent"),
    *("gradients", "error", "eager_error", "time_ratio", "prepared_seconds", "date", "torch"),
)


class Rows:
    """The rows of a CSV file, which is written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_rows(path)

    def of(self, model: str, device: str, method: str | None = None) -> list[Row]:
        """The rows of a model, of one method or of all."""
        return [
            row
            for row in self.rows
            if (row["model"], row["device"]) == (model, device) and method in (None, row["method"])
        ]

    def replace(self, old: list[Row], new: list[Row]) -> None:
        """Put new rows in place of old ones, and write all."""
        self.rows = [row for row in self.rows if row not in old] + new
        write_rows(self.path, COLUMNS, self.rows)


def reason(stderr: str) -> str:
    """The error that a process ended with, in a line: the last that names one, else the last line."""
    lines = stderr.strip().splitlines() or ["no word"]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    text = (named or lines)[-1].replace(str(CHILD.parents[1]), "").replace("|", "/")
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def run(model: str, method: str, setting: str, device: str, pairs: int = PAIRS) -> list[Row]:
    """The rows of one process."""
    command = [sys.executable, str(CHILD), model, method, setting, device, str(pairs)]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode:
        found = [{"gradients": f"failed: {reason(done.stderr)}"}]
    else:
        found = json.loads(done.stdout.splitlines()[-1])
    about = {"model": model, "method": method, "device": device, "torch": torch.__version__}
    date = datetime.now(UTC).date().isoformat()
    empty = dict.fromkeys(COLUMNS, "")
    return [empty | about | {"setting": setting, "date": date} | row for row in found]


def asked(rows: Rows, model: str, device: str, methods: list[str]) -> Iterator[tuple[str, str]]:
    """The ways to measure, in turn: those of others, then ours at their peaks."""
    for name, method in METHODS.items():
        if name in methods:
            yield from ((name, setting) for setting in method.settings)
    for name in STRATEGIES:
        if name in methods:
            yield name, "planned"
    for row in rows.of(model, device):
        ours = "hybrid, compiled" if row["method"] == "inductor" else "hybrid"
        if row["method"] in METHODS and row["peak_bytes"] and ours in methods and row["method"] != "eager":
            yield ours, str(row["peak_bytes"])
    for name in STRATEGIES:  # the least of each strategy is trained as well
        planned = [int(row["setting"]) for row in rows.of(model, device, name) if row["predicted_bytes"]]
        if name in methods and planned:
            yield name, str(min(planned))


def measure_model(rows: Rows, model: str, device: str, methods: list[str], *, fresh: bool) -> None:
    """Measure what is asked for and not there."""
    done: set[tuple[str, str]] = set()
    console = Console(stderr=True)
    for method, setting in asked(rows, model, device, methods):
        there = rows.of(model, device, method)
        if setting != "planned":
            there = [row for row in there if row["setting"] == setting and row["gradients"]]
        known = any(not row["gradients"].startswith("failed") for row in there)
        if (method, setting) in done or (known and not fresh):
            continue
        done.add((method, setting))
        found = run(model, method, setting, device)
        rows.replace(there, found)
        console.print(f"{model} {method} {setting}: {found[0].get('peak_bytes')} {found[0].get('gradients')}")


def main() -> None:
    """Measure, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--methods", nargs="+", default=[*METHODS, *OURS], choices=[*METHODS, *OURS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=Path, default=DATA / "peers.csv")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--pages", action="store_true")
    options = parser.parse_args()
    rows = Rows(options.rows)
    if not options.pages:
        for model in options.models or recorded_models():
            measure_model(rows, model, options.device, options.methods, fresh=options.fresh)
    write_pages(rows.rows)


if __name__ == "__main__":
    main()

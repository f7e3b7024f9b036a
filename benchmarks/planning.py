"""What planning costs beside a plain capture, stage by stage, in CPU seconds of the process and its children.

    python benchmarks/planning.py [NAME …] [--repeats N] [--pages]

Each model's first step by ``torch.compile(backend="aot_eager")``, its first planned step with an empty cache,
and another with what that kept, each in a process of its own, one after the other. Rows go to
``data/planning.csv``, the table from them to docs/benchmarks.md; ``--pages`` does only that. Repeats are
interleaved, and the least of each figure counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from generated import Row, read_rows, write_part, write_rows
from rich.console import Console

SCRIPT: Final = "planning.py"
CHILD: Final = Path(__file__).with_name("planning_child.py")
ROWS: Final = Path(__file__).with_name("data") / "planning.csv"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
COLUMNS: Final = ("model", "limit", "how", "seconds", "first_step", "stages", "ops", "load", "date", "torch")

SMALL: Final = {"batch": 2, "length": 256}
"""Steps that take little beside their capture, so that the figures are those of capture and planning."""

MODELS: Final[dict[str, tuple[str, dict[str, Any], float]]] = {
    "GPT-2, 12 layers": ("gpt2", {"n_layer": 12}, 1.3),
    "GPT-2, 32 layers": ("gpt2", {"n_layer": 32, **SMALL}, 1.2),
    "GPT-2, 48 layers": ("gpt2", {"n_layer": 48, **SMALL}, 1.2),
    "Llama, 32 layers": ("llama", {"num_hidden_layers": 32, **SMALL}, 1.2),
    "Llama, 48 layers": ("llama", {"num_hidden_layers": 48, **SMALL}, 1.2),
    "BERT, 12 layers": ("bert", {"num_hidden_layers": 12}, 1.3),
    "ViT": ("vit", {}, 1.2),
    "ResNet-50": ("resnet50", {}, 1.4),
    "ResNet-152": ("resnet50", {"depths": [3, 8, 36, 3]}, 1.2),
    "T5, 6+6 layers": ("t5", {"num_layers": 6, "num_decoder_layers": 6}, 1.4),
    "U-Net": ("unet", {}, 2.5),
}
"""The built-in model, changes of its config, and what planning should take at most, in plain captures."""

LIMIT: Final = "60%"


def measured(name: str, how: str, cache: Path) -> Row:
    """A row of one way to prepare a model."""
    model, changes, _ = MODELS[name]
    command = [sys.executable, str(CHILD), model, json.dumps(changes), how.split()[0], LIMIT]
    environment = {**os.environ, "HYBRIDREMAT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    load = os.getloadavg()[0]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}, {how}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "model": name,
        "limit": LIMIT,
        "how": how,
        "seconds": round(found.get("planning", found["first_step"]), 2),
        "first_step": round(found["first_step"], 2),
        "stages": json.dumps({stage: round(s, 2) for stage, s in found.get("stages", {}).items()}),
        "ops": found.get("ops", ""),
        "load": round(load, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
    }


def repeated(name: str, repeats: int) -> list[Row]:
    """Rows of a model, the plain capture between the planned ones."""
    rows: list[Row] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            rows += [measured(name, how, Path(folder)) for how in ("plain", "planned cold", "planned warm")]
    return rows


def least(rows: Sequence[Row], how: str) -> Row:
    """The row of least time among those of one way."""
    return min((row for row in rows if row["how"] == how), key=lambda row: float(row["seconds"]))


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    by_model: Mapping[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_model[row["model"]].append(row)
    yield "| model | plain capture | planned | times it, asked | a kept plan | stages of planning |"
    yield "|---|---|---|---|---|---|"
    for name in (each for each in MODELS if each in by_model):
        plain, cold, warm = (least(by_model[name], how) for how in ("plain", "planned cold", "planned warm"))
        ratio, asked = float(cold["seconds"]) / float(plain["seconds"]), MODELS[name][2]
        mark = "**" if ratio > asked else ""
        stages = ", ".join(f"{stage} {float(s):.1f}" for stage, s in json.loads(cold["stages"]).items())
        seconds = [f"{float(each['seconds']):.1f} s" for each in (plain, cold, warm)]
        cells = (name, *seconds[:2], f"{mark}{ratio:.2f}{mark}, {asked}", seconds[2], stages)
        yield "| " + " | ".join(cells) + " |"


def described(rows: Sequence[Row]) -> str:
    """What stands above the table."""
    dates, loads = sorted({row["date"] for row in rows}), [float(row["load"]) for row in rows]
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return (
        f"`python benchmarks/planning.py`: CPU seconds of the process and its children, {days}, "
        f"torch {rows[-1]['torch']}, one thread, 2 cores with a load of {min(loads):.1f} to {max(loads):.1f} "
        f"(repeats differ by 15 to 25 %), limit {LIMIT} of the plain peak, cost model `flops`. The plain "
        'capture is the first step of `torch.compile(backend="aot_eager")`, planning is `wrap` with its own. '
        "In bold: more than was asked for."
    )


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *table(rows)))


def main() -> None:
    """Measure the models asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--pages", action="store_true")
    options = parser.parse_args()
    rows, console = read_rows(ROWS), Console(stderr=True)
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(MODELS)}")
    for name in () if options.pages else options.names or MODELS:
        rows = [row for row in rows if row["model"] != name] + repeated(name, options.repeats)
        write_rows(ROWS, COLUMNS, rows)
        console.print("\n".join(table([row for row in rows if row["model"] == name])))
    write_part(PAGE, SCRIPT, part(rows))


if __name__ == "__main__":
    main()

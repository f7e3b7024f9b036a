"""The demo's table in docs/benchmarks.md: in words, and as the demo prints it.

    python benchmarks/demo.py [NAME …] [--pages]

Runs ``hybridremat demo`` in a process of its own with an empty cache. Rows go to ``data/demo.csv``, what is
written from them to the page; ``--pages`` does only that.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from generated import Row, circumstances, days, loads, printed_by, read_rows, versions, write_part, write_rows

from hybridremat.cli.demo_models import DEMO_MODELS
from hybridremat.cli.demo_table import DemoRow, demo_table
from hybridremat.reports.text import rendered

SCRIPT: Final = "demo.py"
ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "benchmarks.md"
ROWS: Final = Path(__file__).with_name("data") / "demo.csv"
COLUMNS: Final = (*(each.name for each in fields(DemoRow)), "load", "date", "torch")
STEPS: Final = 3

READ: Final[Mapping[str, Callable[[str], Any]]] = {
    "str": str,
    "int": int,
    "float": float,
    "tuple[str, ...]": lambda text: tuple(json.loads(text)),
}
"""How the text of a field is read, by its annotation."""


def measured(names: Sequence[str]) -> list[Row]:
    """What the demo prints of some models, each row as it is kept."""
    load = os.getloadavg()[0]
    asked = ("--models", ",".join(names), "--steps", str(STEPS))
    printed = json.loads(printed_by("-m", "hybridremat", "demo", *asked, "--json"))
    return [{**row, "differing": json.dumps(row["differing"]), **circumstances(load)} for row in printed]


def demo_row(row: Row) -> DemoRow:
    """A row of the demo from its text."""
    return DemoRow(**{each.name: READ[str(each.type)](row[each.name]) for each in fields(DemoRow)})


def printed(rows: Sequence[Row]) -> str:
    """The table as the demo prints it."""
    table = rendered([demo_table([demo_row(row) for row in rows])]).strip("\n")
    head = (
        f"What `make demo` prints at its end, on 2 cores with {loads(rows)}, {days(rows)}\n"
        "(`benchmarks/demo.py`; times, and plans that are chosen by measured times, vary):"
    )
    return f"{head}\n\n```text\n{table}\n```"


def part(rows: Sequence[Row]) -> str:
    """What the script writes into docs/benchmarks.md."""
    found = [demo_row(row) for row in rows]
    seconds = [row.planning_seconds for row in found]
    inside = [row for row in found if not row.reserve]
    exact = sum(row.measured_peak == row.predicted_peak for row in inside)
    return (
        f"`python benchmarks/demo.py`: `hybridremat demo` with an empty cache, {days(rows)}, "
        f"{versions(rows)}, one thread, 2 cores with {loads(rows)}, cost model `profile`, {STEPS} AdamW "
        f"steps. Planning took {min(seconds):.0f} to {max(seconds):.0f} s of wall "
        "clock for one limit, capture and [polishing](method.md#polishing) included. "
        f"{equality(found)} Where the loss is inside the model, the measured peak was the predicted one to "
        f"the byte in {exact} of {len(inside)} rows.\n\n{printed(rows)}"
    )


def equality(rows: Sequence[DemoRow]) -> str:
    """Whether numbers were equal and limits kept, in words."""
    passed = sum(row.passed for row in rows)
    count = f"all {passed}" if passed == len(rows) else f"{passed} of {len(rows)}"
    return (
        f"In {count} rows every loss, gradient, buffer and parameter of each step was equal, bit for bit, to "
        "plain training's (gradients are gone, and not compared, where the optimizer steps in the backward), "
        "and no step passed its limit."
    )


def main() -> None:
    """Run the demo with the models asked for and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(DEMO_MODELS)}; else all")
    parser.add_argument("--pages", action="store_true", help="only write the page from the rows")
    options = parser.parse_args()
    rows = read_rows(ROWS)
    if not options.pages:
        found = measured(options.names or [*DEMO_MODELS])
        rows = [row for row in rows if row["model"] not in {each["model"] for each in found}] + found
        order = [model.name for model in DEMO_MODELS.values()]
        write_rows(ROWS, COLUMNS, sorted(rows, key=lambda row: order.index(row["model"])))
    write_part(PAGE, SCRIPT, part(read_rows(ROWS)))


if __name__ == "__main__":
    main()

"""What the search for a plan takes beside the capture, and what it wins.

    python benchmarks/search.py [NAME …] [--costs flops profile] [--pages]

Each model's step is captured once and planned under four limits: 80, 60 and 40 % of the plain peak, and the
least limit. Where a step takes 100 ms and more, a search without a bound (``planning_budget="unlimited"``) is
done as well. CPU seconds of a process and its children, one model at a time. Rows go to ``data/search.csv``,
the table from them to docs/benchmarks.md; ``--pages`` does only that. Without names: built-in models and nets
that are hard to search; ``all``: the models of the compatibility table, too (hours).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch
from generated import Row, in_a_process, read_rows, write_part, write_rows
from rich.console import Console
from search_nets import NETS

SCRIPT: Final = "search.py"
CHILD: Final = Path(__file__).with_name("search_child.py")
ROWS: Final = Path(__file__).with_name("data") / "search.csv"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
COLUMNS: Final = (
    *("model", "cost", "limit", "ops", "step", "capture", "costs", "seconds", "overhead", "share"),
    *("whole", "whole_seconds", "load", "date", "torch"),
)
ZOO: Final = ("gpt2", "llama", "bert", "vit", "t5", "resnet50", "unet")
SHORT: Final = 0.1
"""Seconds: for shorter steps planning is to take three captures and two seconds at most."""


def every_model() -> dict[str, str]:
    """The kind of each model that there is, by name."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.compat.every_case import EVERY

    return dict.fromkeys(ZOO, "zoo") | dict.fromkeys(NETS, "net") | {case.name: "case" for case in EVERY}


def measured(kind: str, name: str, cost: str) -> list[Row]:
    """The rows of a model, one for each limit."""
    load = round(os.getloadavg()[0], 1)
    found: list[Row] = in_a_process(str(CHILD), kind, name, cost)
    date = datetime.now(UTC).date().isoformat()
    about = {"model": name, "cost": cost, "load": load, "date": date, "torch": torch.__version__}
    return [{key: value for key, value in (row | about).items() if key in COLUMNS} for row in found]


def allowed(row: Row) -> float:
    """Seconds that planning a short step is to take at most."""
    return 3 * float(row["capture"]) + 2


def taken(row: Row) -> float:
    """Seconds that planning took."""
    return float(row["costs"]) + float(row["seconds"])


def is_counted(row: Row) -> bool:
    """Whether a step is short and the limit feasible."""
    return float(row["step"]) < SHORT and row.get("overhead") not in ("", None)


def is_late(row: Row) -> bool:
    """Whether a short step was planned for longer than it is to be."""
    return is_counted(row) and taken(row) > allowed(row)


def is_shown(row: Row) -> bool:
    """Whether the page shows a row: of models of the compatibility table, what took too long."""
    return row["model"] in (*ZOO, *NETS) or is_late(row)


def _seconds(row: Row) -> str:
    if row.get("seconds") in ("", None):
        return "–"
    return f"**{taken(row):.1f} s**" if is_late(row) else f"{taken(row):.1f} s"


def _overheads(row: Row) -> str:
    if row.get("overhead") in ("", None):
        return "not feasible"
    text = f"{100 * float(row['overhead']):.2f}"
    if row.get("whole") in ("", None):
        return f"{text} %"
    return f"{text}, {100 * float(row['whole']):.2f} % in {float(row['whole_seconds']):.1f} s"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    yield "| model | costs | step | capture | limit | planned in | overhead; without a bound |"
    yield "|---|---|---|---|---|---|---|"
    for row in filter(is_shown, rows):
        limit = row["limit"] if row["limit"] != "least" else f"least, {100 * float(row['share']):.1f} %"
        about = f"{row['model']} | {row['cost']} | {1000 * float(row['step']):.3g} ms"
        yield f"| {about} | {float(row['capture']):.1f} s | {limit} | {_seconds(row)} | {_overheads(row)} |"


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    dates, loads = sorted({row["date"] for row in rows}), [float(row["load"]) for row in rows]
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    short = [row for row in rows if is_counted(row)]
    late = sum(map(is_late, short))
    both = [row for row in rows if {row.get("whole"), row.get("overhead")}.isdisjoint(("", None))]
    worst = max((100 * (float(row["overhead"]) - float(row["whole"])) for row in both), default=0.0)
    return "\n".join((
        f"`python benchmarks/search.py`: CPU seconds of a process and its children, {days}, torch "
        f"{rows[-1]['torch']}, one thread, 2 cores with a load of {min(loads):.1f} to {max(loads):.1f}. "
        "Planning is all that comes after the capture, kernel trials and, by `profile`, times included. Of "
        f"steps under 100 ms it took more than three captures and 2 s in {late} of {len(short)} "
        f"feasible cases (in bold) of {len({row['model'] for row in rows})} models. The table shows the "
        "built-in ones, nets that are hard to search, and what took too long; all rows are in "
        f"`benchmarks/data/search.csv`. Plans of longer steps are at most {worst:.2f} points slower than "
        "those of a search without a bound, which stand beside them.",
        "",
        *table(rows),
    ))


def main() -> None:
    """Measure the models asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="models, or all")
    parser.add_argument("--costs", nargs="*", default=["flops", "profile"])
    parser.add_argument("--pages", action="store_true")
    options = parser.parse_args()
    kinds, rows, console = every_model(), read_rows(ROWS), Console(stderr=True)
    asked = [*kinds] if options.names == ["all"] else options.names or [*ZOO, *NETS]
    if unknown := [name for name in asked if name not in kinds]:
        parser.error(f"there is no {unknown[0]!r}")
    for name in () if options.pages else asked:
        for cost in options.costs:
            try:
                found = measured(kinds[name], name, cost)
            except RuntimeError as error:
                console.print(f"not measured: {error}", markup=False)
                continue
            rows = [row for row in rows if (row["model"], row["cost"]) != (name, cost)] + found
            write_rows(ROWS, COLUMNS, rows)
            console.print("\n".join(table(found)))
    write_part(PAGE, SCRIPT, part(read_rows(ROWS)))


if __name__ == "__main__":
    main()

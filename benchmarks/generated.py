"""What scripts write: rows of CSV files, and parts of pages between two marks."""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any, Final

from hybridremat.files import write_atomic

END: Final = "<!-- end -->"

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a CSV file whole; what a row lacks is empty."""
    content = StringIO()
    writer = csv.DictWriter(content, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, content.getvalue())


def in_a_process(script: str, *arguments: str, environment: Mapping[str, str] = {}) -> Any:
    """What a script prints as JSON in its last line; raises and runs it as :func:`printed_by`."""
    return json.loads(printed_by(script, *arguments, environment=environment).splitlines()[-1])


def printed_by(script: str, *arguments: str, environment: Mapping[str, str] = {}) -> str:
    """What a script prints, run with one thread and an empty cache, unless told otherwise.

    Raises
    ------
    RuntimeError
        If it fails, with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        around = {**os.environ, "HYBRIDREMAT_CACHE": folder, "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, script, *arguments]
        done = subprocess.run(command, env=around, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def gone_on(
    script: str,
    path: Path,
    columns: Sequence[str],
    tasks: Sequence[tuple[str, ...]],
    *,
    again: bool,
    environment: Mapping[str, str] = {},
) -> list[Row]:
    """All rows of a file; the script first makes those of tasks that it lacks, or ``again`` those of all.

    A task is what the first columns say. Each is done in a process of its own (``--here`` and the task), and
    its rows are written as they come, so that an interrupted run goes on.
    """
    for task in tasks:
        rows = read_rows(path)
        others = [row for row in rows if tuple(row[name] for name in columns[: len(task)]) != task]
        if again or len(others) == len(rows):
            found = in_a_process(script, "--here", *task, environment=environment)
            write_rows(path, columns, [*others, *found])
            print(*task, "measured", file=sys.stderr)
    return read_rows(path)


def task_options(description: str | None, every: Sequence[str]) -> argparse.Namespace:
    """``names`` to measure, none with ``--pages``; ``again``: whether they were named; ``here``: a task."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(every)}; else those that are missing")
    parser.add_argument("--pages", action="store_true", help="only write the page from the rows")
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in every]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(every)}")
    options.again = bool(options.names)
    options.names = [] if options.pages else options.names or [*every]
    return options


def cpu_seconds() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def circumstances(load: float) -> Row:
    """What a row says of how it was measured; the load is that of before."""
    import torch

    return {
        "load": round(load, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
    }


def days(rows: Sequence[Row]) -> str:
    """The day on which rows were measured, or the first and the last."""
    dates = sorted(row["date"] for row in rows)
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def versions(rows: Sequence[Row]) -> str:
    """The releases of torch that rows were measured with."""
    return "torch " + ", ".join(sorted({row["torch"] for row in rows}))


def loads(rows: Sequence[Row]) -> str:
    """The load of the machine while rows were measured, where it was kept."""
    found = sorted(float(row["load"]) for row in rows if row["load"])
    if not found:
        return "other work"
    return "a load of " + " to ".join(dict.fromkeys(f"{load:.1f}" for load in (found[0], found[-1])))


def older_day(row: Row) -> str:
    """The day, in brackets, of a row from before loads were kept; else nothing."""
    return "" if row["load"] else f" ({row['date']})"


def begin(script: str) -> str:
    """The mark where a script's part of a page begins."""
    return f"<!-- written by benchmarks/{script}: begin -->"


def written(page: Path, script: str) -> str:
    """What stands between the marks of a script."""
    return page.read_text(encoding="utf-8").partition(begin(script))[2].partition(END)[0].strip()


def write_part(page: Path, script: str, text: str) -> None:
    """Put a text in place of what stands between the marks of a script.

    Raises
    ------
    ValueError
        If the page does not have both; it stays as it is.
    """
    before, opening, rest = page.read_text(encoding="utf-8").partition(begin(script))
    _, closing, after = rest.partition(END)
    if not (opening and closing):
        raise ValueError(f"{page.name} has no part between {begin(script)} and {END}")
    write_atomic(page, f"{before}{opening}\n\n{text}\n\n{closing}{after}")

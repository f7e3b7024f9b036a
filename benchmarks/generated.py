"""What scripts write: rows of CSV files, and parts of pages between two marks."""

from __future__ import annotations

import csv
from collections.abc import Sequence
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


def begin(script: str) -> str:
    """The mark where a script's part of a page begins."""
    return f"<!-- written by benchmarks/{script}: begin -->"


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

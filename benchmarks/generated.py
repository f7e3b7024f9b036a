"""Parts of pages that scripts write, between two marks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hybridremat.files import write_atomic

END: Final = "<!-- end -->"


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

"""Write docs/compatibility.md's table from the lines that tests/compat left.

Usage: python tools/compat_table.py FOLDER PAGE. What stands above the page's marker is kept.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

MARKER = "<!-- The rest of this page is written by `make compat`. -->"
MIB = 1 << 20


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.1f} %"


def architecture_row(line: dict[str, Any]) -> str:
    """One model: what was asked, what was measured, at half-way and at the least limit."""
    cells = [line["name"], line["outcome"], f"{line['plain_bytes'] / MIB:.1f}"]
    for share in ("half-way", "least"):
        figures = line[share]
        cells += [
            percent(figures["limit"]),
            f"{figures['measured'] / MIB:.2f}",
            percent(figures["extra_flops"]),
        ]
    return "| " + " | ".join([*cells, line.get("remark", "")]) + " |"


def section(group: str, lines: list[dict[str, Any]]) -> list[str]:
    """The heading and the table of a group; lines without figures say what happens in words, or count."""
    lines = sorted(lines, key=lambda line: str(line["name"]).lower())
    measured = [line for line in lines if "half-way" in line]
    told = [line for line in lines if "half-way" not in line and "counts" not in line]
    counted = sum((Counter(line["counts"]) for line in lines if "counts" in line), Counter[str]())
    text = [f"## {group}", ""]
    if measured:
        text += [
            "| model | result | plain step, MiB | limit half-way | measured, MiB | extra flops "
            "| least limit | measured, MiB | extra flops | remark |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *map(architecture_row, measured),
            "",
        ]
    if told:
        text += ["| what | result | remark |", "|---|---|---|"]
        text += [f"| {line['name']} | {line['outcome']} | {line.get('remark', '')} |" for line in told]
        text.append("")
    if counted:
        text += ["| entries | result |", "|---|---|"]
        text += [f"| {count} | {what} |" for what, count in counted.most_common()]
        text.append("")
    return text


def main() -> None:
    """Write the page."""
    folder, page = Path(sys.argv[1]), Path(sys.argv[2])
    lines = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    if not lines:
        sys.exit(f"no lines in {folder}: run `make compat`")
    head = page.read_text().partition(MARKER)[0].rstrip()
    text = [head, "", MARKER, ""]
    for group in sorted({str(line["group"]) for line in lines}):
        text += section(group, [line for line in lines if line["group"] == group])
    temporary = page.with_suffix(".tmp")
    temporary.write_text("\n".join(text).rstrip() + "\n")
    temporary.replace(page)
    print(f"{page}: {len(lines)} lines")


if __name__ == "__main__":
    main()

"""Results of the GPU benchmark: rows from records, as a table for people and as markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_schedule import Record
from rich.box import SIMPLE_HEAD
from rich.table import Table

from hybridremat.units import format_bytes

Row = dict[str, Any]


def rows_of(records: Sequence[Record]) -> list[Row]:
    """One row for each stage that was started, with all its figures, in the order of the records.

    A stage that was run again has the figures of the last run.
    """
    rows: dict[tuple[str, str], Row] = {}
    for record in records:
        key = (str(record["model"]), str(record["method"]))
        if record["kind"] == "start":
            rows[key] = {"status": "running"}
        rows.setdefault(key, {"status": "running"}).update(
            {name: value for name, value in record.items() if name != "kind"}
        )
    eager = {model: row.get("peak") for (model, method), row in rows.items() if method == "eager"}
    for (model, _), row in rows.items():
        if row.get("peak") and eager.get(model):
            row["peak_of_eager"] = row["peak"] / eager[model]
    return list(rows.values())


LEGEND = (
    "Peaks are step memory: what is allocated above parameters, optimizer state and inputs. Time: the median "
    "of pairs of steps, taken in turn with eager ones. A second: tokens of language models, images of the "
    "others. Largest batch: the largest that was tried and fits what the device has left, AdamW's state "
    "subtracted."
)


@dataclass(frozen=True)
class Column:
    """One column: its title, and its text for a row; ``–`` where the row has no such figure."""

    title: str
    key: str
    text: Callable[[Any], str] = str

    def cell(self, row: Mapping[str, Any]) -> str:
        """The text for one row."""
        value = row.get(self.key)
        return "–" if value is None else self.text(value)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


COLUMNS = (
    Column("model", "model"),
    Column("method", "method"),
    Column("batch", "batch"),
    Column("peak", "peak", format_bytes),
    Column("of\neager", "peak_of_eager", "{:.1%}".format),
    Column("predicted", "predicted", format_bytes),
    Column("limit", "limit", format_bytes),
    Column("time,\n× eager", "ratio", "{:.3f}".format),
    Column("a second", "rate", _rate),
    Column("largest\nbatch", "largest"),
    Column("a second\nthere", "largest_rate", _rate),
    Column("prepared\nin", "prepared", "{:.0f} s".format),
    Column("status", "status"),
)


def table_of(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column.title, justify="left" if column.text is str else "right")
    for row in rows:
        table.add_row(*(column.cell(row) for column in COLUMNS))
    return table


def markdown_of(rows: Sequence[Row], about: Mapping[str, Any], missing: Sequence[str]) -> str:
    """For a page: what it ran on, the table, what was not reached, and why stages failed."""
    titles = [column.title.replace("\n", " ") for column in COLUMNS]
    cells = [titles, ["---"] * len(COLUMNS), *([column.cell(row) for column in COLUMNS] for row in rows)]
    lines = [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", *(f"| {' | '.join(line)} |" for line in cells)]
    lines += ["", LEGEND, "", f"Not reached: {', '.join(missing) or 'nothing'}."]
    lines += [f"- {row['model']}/{row['method']}: {row['why']}" for row in rows if row.get("why")]
    return "\n".join(lines) + "\n"

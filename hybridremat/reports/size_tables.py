"""A step at many sizes, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from hybridremat.plans.sizes import SizeRow
from hybridremat.units import format_bytes


def size_cells(rows: Sequence[SizeRow]) -> Iterator[tuple[str, ...]]:
    """The cells of each row: its sizes, what the plain step and the plan need, and the overhead."""
    for row in rows:
        plain = "–" if row.plain_peak is None else format_bytes(row.plain_peak)
        least = f"does not fit: {format_bytes(row.least or 0)} at least"
        needed = least if row.needed is None else format_bytes(row.needed)
        over = "–" if row.overhead is None else f"{100 * row.overhead:+.1f} %"
        yield (*map(str, row.sizes.values()), plain, needed, over)


def size_heads(rows: Sequence[SizeRow]) -> tuple[str, ...]:
    """The heads of these columns."""
    return (*(rows[0].sizes if rows else ()), "plain step", "planned", "extra time")


def size_table(rows: Sequence[SizeRow]) -> Table:
    """A table for the terminal."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in size_heads(rows):
        table.add_column(head, justify="right")
    for cells in size_cells(rows):
        table.add_row(*cells)
    return table

"""The values on which most bytes are kept, and those of which most are made again, over all blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from hybridremat.graph.joint import short_op
from hybridremat.plans.records import PlannedBlock, ValueRecord
from hybridremat.reports.block_rows import common_pattern, runs
from hybridremat.units import format_bytes

FEW = 5
NAME_COLUMNS = 48


@dataclass(frozen=True)
class ValueGroup:
    """Values of one op of one size, in modules whose paths differ in numbers alone: one a layer, say.

    ``blocks`` are the indices of those that make them; ``times``: how often each runs again, at most.
    """

    op: str
    module: str
    bytes: int
    copies: int
    blocks: tuple[int, ...]
    times: int = 0

    @property
    def total(self) -> int:
        """Bytes of all copies."""
        return self.bytes * self.copies


def saved_groups(blocks: Sequence[PlannedBlock]) -> list[ValueGroup]:
    """What is saved, most bytes first."""
    return _groups((block.index, record, 0) for block in blocks for record in block.saved)


def recomputed_groups(blocks: Sequence[PlannedBlock]) -> list[ValueGroup]:
    """What is made more than once, most bytes first."""
    return _groups((block.index, record, times) for block in blocks for record, times in block.recomputed)


def largest_table(blocks: Sequence[PlannedBlock]) -> Table:
    """The first of both, one row each: bytes, how many, op and module, blocks."""
    grid = Table.grid(padding=(0, 2))
    for style in ("bold", "", "", ""):
        grid.add_column(style=style, no_wrap=True)
    for title, groups in (
        ("most saved", saved_groups(blocks)),
        ("most recomputed", recomputed_groups(blocks)),
    ):
        for number, group in enumerate(groups[:FEW]):
            grid.add_row("" if number else title, *map(Text, _cells(group)))
        if not groups:
            grid.add_row(title, "nothing")
    return grid


def _groups(found: Iterable[tuple[int, ValueRecord, int]]) -> list[ValueGroup]:
    by_key: dict[object, list[tuple[int, ValueRecord, int]]] = {}
    for index, record, times in found:
        key = record.op, re.sub(r"\d+", "#", record.module), record.bytes
        by_key.setdefault(key, []).append((index, record, times))
    groups = [
        ValueGroup(
            op=short_op(members[0][1].op),
            module=common_pattern([record.module for _, record, _ in members]),
            bytes=members[0][1].bytes,
            copies=len(members),
            blocks=tuple(sorted({index for index, _, _ in members})),
            times=max(times for _, _, times in members),
        )
        for members in by_key.values()
    ]
    return sorted(groups, key=lambda group: -group.total)


def _cells(group: ValueGroup) -> Iterator[str]:
    copies = f" ×{group.copies}" if group.copies > 1 else ""
    yield f"{format_bytes(group.bytes)}{copies}"
    yield _cut(f"{group.op} {group.module}".strip())
    blocks = runs(group.blocks)
    again = f", up to {group.times} times" if group.times > 1 else ""
    few = blocks if len(blocks) <= 12 else f"{len(group.blocks)} blocks"
    yield f"block {few}{again}" if len(group.blocks) == 1 else f"{'blocks ' * (few == blocks)}{few}{again}"


def _cut(name: str) -> str:
    """A name of at most so many columns: its end says most."""
    return name if len(name) <= NAME_COLUMNS else f"…{name[1 - NAME_COLUMNS :]}"

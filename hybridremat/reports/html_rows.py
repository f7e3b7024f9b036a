"""The rows of a report's table of decisions: identical blocks together, and each block by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridremat.plans.records import PlannedBlock, ValueRecord
from hybridremat.reports.block_rows import block_rows, largest, module_names, option_text, value_name
from hybridremat.reports.html_data import module_range
from hybridremat.units import format_bytes


@dataclass(frozen=True)
class BlockView:
    """The cells of one block; ``saved`` and ``recomputed`` are lines of a size and a text."""

    block: PlannedBlock
    name: str
    option: str
    saved: tuple[tuple[str, str], ...]
    recomputed: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RowView:
    """Blocks with identical decisions: their indices, one name for all, and the cells of each."""

    indices: str
    name: str
    blocks: tuple[BlockView, ...]

    @property
    def first(self) -> BlockView:
        """The block that is shown for all of the row."""
        return self.blocks[0]


def row_views(blocks: Sequence[PlannedBlock]) -> tuple[RowView, ...]:
    """The rows of the table, in the order of their first block."""
    names = module_names(blocks)
    return tuple(
        RowView(
            row.indices,
            row.name,
            tuple(_view(block, names[block.index], row.prefix) for block in row.blocks),
        )
        for row in block_rows(blocks)
    )


def _view(block: PlannedBlock, names: Sequence[str], prefix: str) -> BlockView:
    option = option_text(block) + (f", runs {block.forward_runs}×" if block.forward_runs > 1 else "")
    return BlockView(
        block=block,
        name=module_range(names),
        option=option,
        saved=_cell([(record, 1) for record in block.saved], prefix),
        recomputed=_cell(block.recomputed, prefix),
    )


def _cell(values: Sequence[tuple[ValueRecord, int]], prefix: str) -> tuple[tuple[str, str], ...]:
    """Sizes and names of the largest values, then size and number of the rest."""
    named, rest = largest(values)
    lines = [
        (format_bytes(record.bytes), value_name(record, prefix) + (f" ×{times}" if times > 1 else ""))
        for record, times in named
    ]
    if rest:
        lines.append((format_bytes(sum(record.bytes for record, _ in rest)), f"in {len(rest)} more"))
    return tuple(lines)

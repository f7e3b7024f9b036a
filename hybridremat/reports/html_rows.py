"""The rows of a report's table of decisions: identical blocks together, and each block by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridremat.graph.joint import short_op
from hybridremat.plans.records import PlannedBlock, ValueRecord
from hybridremat.reports.block_rows import block_rows, module_names, module_tail
from hybridremat.reports.html_data import option_text, place_text
from hybridremat.units import format_bytes

SHOWN = 3  # values named in a cell; the rest are counted


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
    """Blocks with identical decisions: their places, their name together, and each by itself."""

    indices: str
    name: str
    blocks: tuple[BlockView, ...]

    @property
    def first(self) -> BlockView:
        """The block whose cells stand for all of the row."""
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
        name=place_text(names),
        option=option,
        saved=_few([(record, 1) for record in block.saved], prefix),
        recomputed=_few(block.recomputed, prefix),
    )


def _few(values: Sequence[tuple[ValueRecord, int]], prefix: str) -> tuple[tuple[str, str], ...]:
    """The largest values, and how many more there are with how much."""
    order = sorted(values, key=lambda item: -item[0].bytes)
    lines = [_line(record, times, prefix) for record, times in order[:SHOWN]]
    rest = order[SHOWN:]
    if rest:
        lines.append((format_bytes(sum(record.bytes for record, _ in rest)), f"in {len(rest)} more"))
    return tuple(lines)


def _line(record: ValueRecord, times: int, prefix: str) -> tuple[str, str]:
    words = [short_op(record.op), module_tail(record.module, prefix)]
    count = f" ×{times}" if times > 1 else ""
    return format_bytes(record.bytes), " ".join(word for word in words if word) + count

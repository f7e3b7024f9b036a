"""The rows of a plan's table, as text and as HTML: which blocks share one, and the words in its cells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hybridremat.graph.joint import short_op
from hybridremat.plans.patterns import ancestors
from hybridremat.plans.records import PlannedBlock, ValueRecord
from hybridremat.units import format_bytes

SHOWN = 3  # values named in a cell; the rest are counted


@dataclass(frozen=True)
class BlockRow:
    """Blocks with identical decisions; ``name``: their modules, ``prefix``: the path that these share."""

    blocks: tuple[PlannedBlock, ...]
    name: str
    prefix: str

    @property
    def first(self) -> PlannedBlock:
        """The block that is shown for all of the row."""
        return self.blocks[0]

    @property
    def indices(self) -> str:
        """Places in the chain: ``3``, ``1–4`` or ``1, 3, 5–7``."""
        return runs([block.index for block in self.blocks])


def block_rows(blocks: Sequence[PlannedBlock], *, merged: bool = True) -> list[BlockRow]:
    """One row for each set of identical decisions, in the order of their first block; or for each block."""
    names = module_names(blocks)
    groups: dict[object, list[PlannedBlock]] = {}
    for block in blocks:
        groups.setdefault(_decision_key(block) if merged else block.index, []).append(block)
    return [
        BlockRow(tuple(group), _row_name(group, names), common_path(names[group[0].index]))
        for group in groups.values()
    ]


def module_names(blocks: Sequence[PlannedBlock]) -> dict[int, tuple[str, ...]]:
    """For each block index, the shortest module paths that cover the block and belong to no other."""
    homes: dict[str, set[int]] = {}
    for block in blocks:
        for module in block.modules:
            for path in ancestors(module):
                homes.setdefault(path, set()).add(block.index)
    return {block.index: _covering(block, homes) for block in blocks}


def _covering(block: PlannedBlock, homes: dict[str, set[int]]) -> tuple[str, ...]:
    own = [[path for path in ancestors(module) if homes[path] == {block.index}] for module in block.modules]
    # Modules that other blocks share are named only where there is nothing else: a layer's own additions
    # are in all of its blocks, and a mask that all layers use belongs to the first of them.
    paths = [found[0] for found in own if found] or list(block.modules)
    return tuple(dict.fromkeys(paths))


def module_tail(module: str, prefix: str = "") -> str:
    """The last names of a path below ``prefix``: ``mlp.c_fc``; a number keeps the name that it numbers."""
    parts = module.split(".")
    below = len(prefix.split(".")) if prefix and module.startswith(prefix + ".") else 0
    start = max(below, len(parts) - 2)
    while start > 0 and parts[start].isdigit():
        start -= 1
    return ".".join(parts[start:])


def common_path(paths: Sequence[str]) -> str:
    """The module that all paths are in: ``h.1`` for ``h.1.ln_1`` and ``h.1.attn``."""
    shared = []
    for column in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return ".".join(shared)


def option_text(block: PlannedBlock) -> str:
    """``3 of 54``, ``solo 2 of 9``; where nothing was decided ``plain``, or ``moves`` if some values do."""
    if block.option is None:
        return "moves" if block.moved else "plain"
    return f"{'solo ' if block.solo else ''}{block.option + 1} of {block.option_count}"


def block_bytes(block: PlannedBlock) -> list[str]:
    """``saved 1.50 MiB``, then the peaks of its forward and of its backward."""
    sizes = {"saved": block.saved_bytes, "fwd": block.forward_peak, "bwd": block.backward_peak}
    return [f"{name} {format_bytes(size)}" for name, size in sizes.items()]


def largest(
    values: Sequence[tuple[ValueRecord, int]],
) -> tuple[list[tuple[ValueRecord, int]], list[tuple[ValueRecord, int]]]:
    """The values that a cell names, largest first, and the rest."""
    order = sorted(values, key=lambda item: -item[0].bytes)
    return order[:SHOWN], order[SHOWN:]


def value_name(record: ValueRecord, prefix: str) -> str:
    """Op and module of a value: ``addmm mlp.c_fc``."""
    return f"{short_op(record.op)} {module_tail(record.module, prefix)}".strip()


def _decision_key(block: PlannedBlock) -> object:
    """Equal for blocks that do the same with the same values, whatever layer they belong to."""
    return (
        tuple(re.sub(r"\d+", "#", module) for module in block.modules),
        (block.forward_ops, block.backward_ops),
        (block.option, block.option_count, block.solo, block.forward_runs),
        tuple(_value_key(record) for record in block.saved),
        tuple((_value_key(record), times) for record, times in block.recomputed),
        (block.saved_bytes, block.forward_peak, block.backward_peak, block.forward_time, block.extra_time),
    )


def _value_key(record: ValueRecord) -> object:
    return record.bytes, record.shape, record.dtype, record.op, re.sub(r"\d+", "#", record.module)


def _row_name(group: Sequence[PlannedBlock], names: dict[int, tuple[str, ...]]) -> str:
    first, last = names[group[0].index], names[group[-1].index]
    if not first or not last:
        return "(no module)"
    adjacent = group[-1].index - group[0].index == len(group) - 1
    starts = [names[block.index][0] for block in group]
    if adjacent or (pattern := _pattern(starts)) is None:
        return _span(first[0], last[-1])
    end = _pattern([names[block.index][-1] for block in group])
    return pattern if end is None else _span(pattern, end)


def _span(first: str, last: str) -> str:
    """``h.1.ln_1 … .attn``: the parent that both share is written once."""
    if first == last:
        return first
    parent = first.rpartition(".")[0]
    numbered = parent.rpartition(".")[2].strip("{}0123456789–, ") == ""
    if parent and numbered and last.startswith(f"{parent}."):
        last = last[len(parent) :]
    return f"{first} … {last}"


def _pattern(paths: Sequence[str]) -> str | None:
    """``h.{1, 3–5}.attn`` for paths that differ in one number; None for others."""
    split = [path.split(".") for path in paths]
    if len({len(parts) for parts in split}) != 1:
        return None
    columns = list(zip(*split, strict=True))
    varying = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying) != 1 or not all(part.isdigit() for part in columns[varying[0]]):
        return None
    parts = list(split[0])
    parts[varying[0]] = "{" + runs([int(part) for part in columns[varying[0]]]) + "}"
    return ".".join(parts)


def common_pattern(paths: Sequence[str]) -> str:
    """One path for those that differ in numbers alone: ``h.{1, 3–5}.attn``, or ``h.*.parts.*``."""
    distinct = list(dict.fromkeys(paths))
    if len(distinct) == 1:
        return distinct[0]
    if (found := _pattern(distinct)) is not None:
        return found
    columns = zip(*(path.split(".") for path in distinct), strict=False)
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def runs(numbers: Sequence[int]) -> str:
    """Numbers in rising order with stretches drawn together: ``1, 3–5``."""
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    return ", ".join(f"{s[0]}–{s[-1]}" if len(s) > 1 else str(s[0]) for s in stretches)

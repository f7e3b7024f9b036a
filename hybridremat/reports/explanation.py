"""Explanations of one block or one module: as data, and as the text that ``print`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hybridremat.graph.joint import short_op
from hybridremat.plans.records import PlannedBlock, ValueRecord
from hybridremat.reports.block_rows import block_bytes, common_path, module_tail, option_text
from hybridremat.reports.text import COUNTED, rendered
from hybridremat.reports.what_if import Change, Headroom
from hybridremat.units import format_bytes, format_time

Treatment = Literal["SAVE", "MOVE", "RECOMPUTE", "FREE"]

SHOWN_OPTIONS = 8

NOTE = (
    "If saved, if made again: the step's memory and time if this one value were kept as well, or computed "
    "again instead of moved, all else as it is. Free bytes are those under the limit, with what other blocks "
    "hold."
)


@dataclass(frozen=True)
class ValueExplanation:
    """What the plan does with one value.

    Attributes
    ----------
    policy
        SAVE: kept from the forward for the backward. MOVE: it waits in host memory between them.
        RECOMPUTE: computed again. FREE: none of these.
    times
        How often it is computed again.
    if_saved
        The step if this value were saved as well, on the device; None if it is, or cannot be.
    if_again
        The step if this value were computed again instead of moved; None if it does not move, or cannot be.
    in_place
        How many of the calls that make it write it over one of their inputs.
    parts
        How the kernel that makes it is run by parts (``by 8 rows``); empty if it is not.
    """

    value: ValueRecord
    block: int
    policy: Treatment
    times: int = 0
    if_saved: Change | None = None
    if_again: Change | None = None
    in_place: int = 0
    parts: str = ""


@dataclass(frozen=True)
class OptionExplanation:
    """One option of a block; ``change`` is the step with it, all else as it is (None: it is the chosen one).

    Bytes and nanoseconds are those of the option alone, without what other blocks hold.
    """

    number: int
    saved_bytes: int
    forward_peak: int
    backward_peak: int
    time: int
    change: Change | None


@dataclass(frozen=True)
class BlockExplanation:
    """One block: its decision, its values, its headroom and its options; ``reason`` says why in words.

    ``compiled``: what is said is counted, and the limit is held by the code of a compiler.
    """

    block: PlannedBlock
    modules: tuple[str, ...]
    values: tuple[ValueExplanation, ...]
    headroom: Headroom | None
    options: tuple[OptionExplanation, ...]
    reason: str
    compiled: bool = False

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        return rendered(block_text(self))


@dataclass(frozen=True)
class ModuleExplanation:
    """What the plan does with the values of one module and of the modules in it; ``headroom`` by block.

    ``compiled``: see :class:`BlockExplanation`.
    """

    module: str
    values: tuple[ValueExplanation, ...]
    headroom: dict[int, Headroom]
    compiled: bool = False

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        return rendered(module_text(self))


def block_text(explained: BlockExplanation, *, everything: bool = False) -> list[RenderableType]:
    """One block; ``everything``: all of its options, not only the nearest."""
    block = explained.block
    grid = _grid()
    grid.add_row("block", str(block.index))
    grid.add_row("in the model", ", ".join(explained.modules) or "(no module)")
    grid.add_row("ops", f"{block.forward_ops} forward, {block.backward_ops} backward")
    grid.add_row("option", _option(block))
    grid.add_row("bytes", ", ".join(block_bytes(block)))
    forward, extra = format_time(block.forward_time), format_time(block.extra_time)
    grid.add_row("time", f"forward {forward}, made again {extra}")
    if explained.headroom is not None:
        grid.add_row("free there", _headroom(explained.headroom))
    if explained.reason:
        grid.add_row("why", explained.reason)
    parts: list[RenderableType] = [grid, _value_table(explained.values, blocks=False)]
    if explained.headroom is not None:
        parts.append(_note(compiled=explained.compiled))
    if explained.options:
        parts.append(_option_table(explained.options, everything=everything))
    return parts


def module_text(explained: ModuleExplanation) -> list[RenderableType]:
    """What the plan does with the values of a module."""
    grid = _grid()
    grid.add_row("module", explained.module)
    kept = [each for each in explained.values if each.policy == "SAVE"]
    again = [each for each in explained.values if each.policy == "RECOMPUTE"]
    grid.add_row("saved", f"{len(kept)} values, {format_bytes(sum(each.value.bytes for each in kept))}")
    if moved := [each for each in explained.values if each.policy == "MOVE"]:
        grid.add_row("moved", f"{len(moved)} values, {format_bytes(sum(each.value.bytes for each in moved))}")
    took = format_time(sum(each.value.time * each.times for each in again))
    size = format_bytes(sum(each.value.bytes for each in again))
    grid.add_row("recomputed", f"{len(again)} values, {size}, {took}")
    for index, headroom in explained.headroom.items():
        grid.add_row(f"free in block {index}", _headroom(headroom))
    return [grid, _value_table(explained.values, blocks=True), _note(compiled=explained.compiled)]


def _note(*, compiled: bool) -> Text:
    return Text(f"{NOTE} {COUNTED}" if compiled else NOTE, style="dim")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    return grid


def _option(block: PlannedBlock) -> str:
    runs = f", its whole forward runs ×{block.forward_runs}" if block.forward_runs > 1 else ""
    return option_text(block) + runs


def _headroom(headroom: Headroom) -> str:
    free = {
        "forward peak": headroom.forward,
        "saved": headroom.between,
        "backward peak": headroom.backward,
    }
    figures = ", ".join(f"{where} {format_bytes(size)}" for where, size in free.items())
    return f"{figures}; what binds: {headroom.binds}"


def _value_table(values: Sequence[ValueExplanation], *, blocks: bool) -> Table:
    prefix = common_path([each.value.module for each in values if each.value.module])
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    moves = any(each.policy == "MOVE" for each in values)
    titles = ["policy", "bytes", "shape", "dtype", "op", "time", "module", "source", "if saved"]
    titles += ["if made again"] if moves else []
    for title in (["block"] if blocks else []) + titles:
        right = title in ("bytes", "time", "block")
        table.add_column(title, overflow="fold", justify="right" if right else "left")
    for each in values:
        record = each.value
        shape = "×".join(str(size) for size in record.shape) or "scalar"
        policy = each.policy + (f" {each.times}×" if each.times else "")
        module, place = module_tail(record.module, prefix), _file_and_line(record.source)
        op = short_op(record.op) + (", in place" if each.in_place else "")
        op += f", {each.parts}" if each.parts else ""
        cells = [policy, format_bytes(record.bytes), shape, record.dtype, op]
        cells += [format_time(record.time), module, place, _changed(each.if_saved)]
        cells += [_changed(each.if_again)] if moves else []
        table.add_row(*([str(each.block)] if blocks else []), *map(Text, cells))
    return table


def _file_and_line(source: str) -> str:
    """``modeling_gpt2.py:310``, without the folders."""
    return source.rpartition("/")[2]


def _changed(change: Change | None) -> str:
    if change is None:
        return ""
    sign = "−" if change.more_time < 0 else "+"
    time = f"{sign}{format_time(abs(change.more_time))}"
    if change.fits:
        return f"fits, {time}"
    return f"{format_bytes(change.over)} over, {time}"


def _option_table(options: Sequence[OptionExplanation], *, everything: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    table.title = "Its options" if everything else "Its options, and what the step would be: the nearest"
    for title in ("option", "saves", "forward", "backward", "extra time", "the step with it"):
        table.add_column(title, justify="left" if title.startswith("the") else "right")
    for option in options if everything else _nearest(options):
        sizes = (option.saved_bytes, option.forward_peak, option.backward_peak)
        verdict = "this one runs" if option.change is None else _changed(option.change)
        table.add_row(
            str(option.number + 1), *map(format_bytes, sizes), format_time(option.time), Text(verdict)
        )
    return table


def _nearest(options: Sequence[OptionExplanation]) -> list[OptionExplanation]:
    """The chosen option, and those whose figures are nearest to its own."""
    chosen = next(option for option in options if option.change is None)

    def distance(option: OptionExplanation) -> float:
        return sum(
            abs(ours - theirs) / max(1, ours, theirs)
            for ours, theirs in (
                (option.saved_bytes, chosen.saved_bytes),
                (option.backward_peak, chosen.backward_peak),
                (option.time, chosen.time),
            )
        )

    near = sorted(options, key=distance)[:SHOWN_OPTIONS]
    return sorted(near, key=lambda option: option.number)

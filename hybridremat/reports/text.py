"""Plans as text: a summary, and a table with one row a block, identical blocks merged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hybridremat.graph.joint import short_op
from hybridremat.reports.block_rows import BlockRow, block_rows, module_tail
from hybridremat.units import format_bytes, format_time

if TYPE_CHECKING:
    from hybridremat.plans.plan_data import PlanData
    from hybridremat.plans.records import PinRecord, PlannedBlock, ValueRecord

WIDTH = 120  # columns of text that goes to no terminal
LEGEND = (
    "Ops: forward/backward. Bytes: what the block saves, and the peaks of its forward and of its backward, "
    "without what other blocks hold. Time: its forward, and all that it runs again. A merged row (×n) shows "
    "one of its blocks."
)
NAME_WIDTH = 24
SHOWN = 3  # values named in a cell; the rest are counted


def render(renderables: Sequence[RenderableType], file: TextIO, *, width: int | None = None) -> None:
    """Write rich renderables to a file: plain text, 120 columns wide, unless the file is a terminal."""
    if file.isatty():
        Console(file=file, width=width).print(*renderables, sep="\n")
        return
    text = StringIO()
    console = Console(file=text, width=width or WIDTH, force_terminal=False, color_system=None)
    for renderable in renderables:
        console.print(renderable, crop=False)
    file.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


def rendered(renderables: Sequence[RenderableType]) -> str:
    """Rich renderables as text."""
    out = StringIO()
    render(renderables, out)
    return out.getvalue().rstrip("\n")


def plan_tables(plan: PlanData, *, everything: bool = False) -> list[RenderableType]:
    """The summary of a plan and its table of blocks; ``everything``: identical blocks are not merged."""
    return [summary(plan), block_table(plan, everything=everything), Text(LEGEND, style="dim")]


def summary(plan: PlanData) -> Table:
    """Limit, figures and planning time, one line each."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    if plan.memory_limit is not None:
        kept = f", of which {format_bytes(plan.reserve)} are kept free (reserve)" if plan.reserve else ""
        if plan.forwards > 1:
            kept += f", for {plan.forwards} forwards at a time"
        if plan.asked_limit is not None and plan.asked_limit < plan.memory_limit:
            kept += f"; {format_bytes(plan.asked_limit)} was asked, and nothing fits it"
        grid.add_row("limit", _of_plain(plan.memory_limit, plan) + kept)
    if plan.request.reckoning:
        grid.add_row("limit auto", plan.request.reckoning)
    grid.add_row("predicted peak", _of_plain(plan.predicted_peak, plan))
    grid.add_row("plain peak", f"{format_bytes(plan.plain_peak)} ({plan.plain_peak} bytes)")
    if plan.reserve or plan.forwards > 1:
        grid.add_row("with your own code", _of_plain(plan.needed, plan))
    grid.add_row("least feasible", _of_plain(plan.least_peak, plan))
    if plan.pins:
        grid.add_row("policy", "; ".join(map(_pin, plan.pins)))
    if plan.origin.from_spec:
        grid.add_row("device", f"{plan.origin.device_name}: what kernels allocate as they run is not counted")
    for found in plan.breaks:
        place = found.place.rpartition("/")[2] or "an unknown place"
        across = f"{format_bytes(found.crossing_bytes)} cross it and are kept to the end of the step"
        grid.add_row("graph break", f"{place}: {across} ({found.reason.splitlines()[0]})")
    times = f"{plan.overhead:+.1%} time by cost model {plan.cost_model}"
    grid.add_row("overhead", f"{times}, {plan.extra_flops:+.1%} flops")
    grid.add_row("saved", f"{format_bytes(plan.saved_bytes)} alive between forward and backward")
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in plan.timings.items())
    reused = "; block options of another input shape reused" if plan.reused_options else ""
    grid.add_row("planning", f"{plan.planning_seconds:.1f} s" + (f" ({stages})" if stages else "") + reused)
    return grid


def _pin(record: PinRecord) -> str:
    values = "1 value" if record.values == 1 else f"{record.values} values"
    return f"{record.pattern} {record.action} ({values}, {format_bytes(record.bytes)})"


def block_table(plan: PlanData, *, everything: bool = False) -> Table:
    """One row for each set of identical blocks, or for each block; figures are those of one block."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_footer=True, pad_edge=False, expand=True)
    table.add_column("block", footer=f"all {len(plan.blocks)}", max_width=12)
    table.add_column("in the model", overflow="fold", max_width=NAME_WIDTH)
    table.add_column("ops\noption", footer=_ops(plan.blocks))
    table.add_column("saved values", overflow="fold", ratio=1)
    table.add_column("recomputed values", overflow="fold", ratio=1)
    table.add_column("bytes\ntime", footer=_sums(plan.blocks), no_wrap=True)
    for row in block_rows(plan.blocks, merged=not everything):
        table.add_row(*_cells(row))
    return table


def _of_plain(size: int, plan: PlanData) -> str:
    return f"{format_bytes(size)} ({size} bytes, {100 * size / max(1, plan.plain_peak):.1f} % of plain)"


def _cells(row: BlockRow) -> list[Text]:
    block = row.first
    saved = [_value(record, 1, row.prefix) for record in block.saved]
    again = [_value(record, times, row.prefix) for record, times in block.recomputed]
    count = f" ×{len(row.blocks)}" if len(row.blocks) > 1 else ""
    cells = [
        row.indices,
        _broken(row.name + count),
        f"{_ops([block])}\n{_option(block)}",
        _few(saved, [record.bytes for record in block.saved]),
        _few(again, [record.bytes for record, _ in block.recomputed]),
        f"{_bytes(block)}\n{_time(block)}",
    ]
    return [Text(cell) for cell in cells]


def _sums(blocks: Sequence[PlannedBlock]) -> str:
    saved = format_bytes(sum(block.saved_bytes for block in blocks))
    forward = format_time(sum(block.forward_time for block in blocks))
    extra = format_time(sum(block.extra_time for block in blocks))
    return f"saved {saved}\ntime {forward}\nextra {extra}"


def _broken(name: str) -> str:
    """A name in lines of at most ``NAME_WIDTH``, broken after dots and spaces if it has any."""
    lines = [""]
    for word in re.findall(r"[^ .]*[ .]?", name):
        if len(lines[-1]) + len(word.rstrip()) > NAME_WIDTH and lines[-1]:
            lines.append("")
        lines[-1] += word
        if word == "… ":
            lines.append("")
    return "\n".join(line.rstrip() for line in lines)


def _ops(blocks: Sequence[PlannedBlock]) -> str:
    return f"{sum(b.forward_ops for b in blocks)}/{sum(b.backward_ops for b in blocks)}"


def _option(block: PlannedBlock) -> str:
    if block.option is None:
        return "plain"
    text = f"{'solo ' if block.solo else ''}{block.option + 1} of {block.option_count}"
    return text + (f"\nruns ×{block.forward_runs}" if block.forward_runs > 1 else "")


def _value(record: ValueRecord, times: int, prefix: str) -> str:
    words = [short_op(record.op), module_tail(record.module, prefix), format_bytes(record.bytes)]
    return " ".join(word for word in words if word) + (f" ×{times}" if times > 1 else "")


def _few(texts: Sequence[str], sizes: Sequence[int]) -> str:
    """The largest values, and how many more there are with how much."""
    order = sorted(range(len(texts)), key=lambda i: -sizes[i])
    lines = [texts[i] for i in order[:SHOWN]]
    rest = order[SHOWN:]
    if rest:
        lines.append(f"+ {len(rest)} more, {format_bytes(sum(sizes[i] for i in rest))}")
    return "\n".join(lines) if lines else "–"


def _bytes(block: PlannedBlock) -> str:
    named = {"saved": block.saved_bytes, "fwd": block.forward_peak, "bwd": block.backward_peak}
    return "\n".join(f"{name} {format_bytes(size)}" for name, size in named.items())


def _time(block: PlannedBlock) -> str:
    return f"time {format_time(block.forward_time)}\nextra {format_time(block.extra_time)}"

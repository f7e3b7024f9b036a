"""Plans as text: a summary, and a table with one row a block, identical blocks merged."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hybridremat.graph.joint import JointGraph, plain_schedule
from hybridremat.graph.memory import MemorySimulator, schedule_time
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import Certificate, PinRecord, PlannedBlock, ValueRecord
from hybridremat.reports.block_rows import (
    BlockRow,
    block_bytes,
    block_rows,
    largest,
    option_text,
    value_name,
)
from hybridremat.reports.largest import largest_table
from hybridremat.reports.legend import legend_table
from hybridremat.units import format_bytes, format_share_up, format_time

WIDTH = 120  # columns of text that goes to no terminal
COUNTED = (
    "Blocks, values and options are counted on the graph that the compiler fuses; its code takes some "
    "percent more or less than the count."
)
"""Said of compiled plans, whose peaks are those of the code."""
NAME_WIDTH = 24


def render(renderables: Sequence[RenderableType], file: TextIO) -> None:
    """Write rich renderables to a file: styled on a terminal, else plain text of 120 columns."""
    if file.isatty():
        Console(file=file).print(*renderables, sep="\n")
        return
    text = StringIO()
    console = Console(file=text, width=WIDTH, force_terminal=False, color_system=None)
    for renderable in renderables:
        console.print(renderable, crop=False)
    file.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


def rendered(renderables: Sequence[RenderableType]) -> str:
    """Rich renderables as text."""
    out = StringIO()
    render(renderables, out)
    return out.getvalue().rstrip("\n")


def plan_tables(plan: PlanData, *, everything: bool = False) -> list[RenderableType]:
    """The largest values, the summary, the table of blocks, and what the terms mean.

    ``everything``: identical blocks are not merged.
    """
    lines = summary(plan)
    legend = legend_table([str(name) for name in lines.columns[0].cells])
    tables: list[RenderableType] = [lines, block_table(plan, everything=everything), legend]
    if plan.blocks:
        tables[:0] = [largest_table(plan.blocks), Text()]
    return tables if plan.compiler == "eager" else [*tables, Text(COUNTED, style="dim")]


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
    if plan.compiler != "eager":
        order = "in the plan's order, buffers freed at once" if plan.lean else "with its own scheduling"
        grid.add_row("compiler", f"{plan.compiler}, {order}; peaks are those of its code")
    grid.add_row("predicted peak", _of_plain(plan.predicted_peak, plan))
    grid.add_row("plain peak", f"{format_bytes(plan.plain_peak)} ({plan.plain_peak} bytes)")
    if plan.reserve or plan.forwards > 1:
        grid.add_row("with your own code", _of_plain(plan.needed, plan))
    grid.add_row("least feasible", _of_plain(plan.least_peak, plan))
    if plan.pins:
        grid.add_row("policy", "; ".join(map(_pin, plan.pins)))
    for name, text in (*_covered(plan), *_not_counted(plan), *_breaks(plan)):
        grid.add_row(name, text)
    times = f"{plan.overhead:+.1%} time by cost model {plan.cost_model}"
    grid.add_row("overhead", f"{times}, {plan.extra_flops:+.1%} flops")
    for name, text in (*_own_checkpoints(plan), *_quality(plan), *_moves(plan), *_tuned(plan)):
        grid.add_row(name, text)
    grid.add_row("saved", f"{format_bytes(plan.saved_bytes)} alive between forward and backward")
    for name, text in _rewrites(plan):
        grid.add_row(name, text)
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in plan.timings.items())
    reused = "; block options of another input shape reused" if plan.reused_options else ""
    if plan.search is not None and plan.search.curtailed:
        reused += '; some options of blocks were not worth the search (planning_budget="unlimited")'
    grid.add_row("planning", f"{plan.planning_seconds:.1f} s" + (f" ({stages})" if stages else "") + reused)
    return grid


def _covered(plan: PlanData) -> Iterator[tuple[str, str]]:
    """The sizes that a plan file is for."""
    if (known := plan.coverage) is not None:
        sizes = (f"{name} {size} ({known.ranges[name]})" for name, size in known.own.items())
        counted = f"{len(known.schedules)} schedules, {len(known.rows)} sizes planned"
        yield "sizes", f"{', '.join(sizes)}; {counted}"


def _not_counted(plan: PlanData) -> Iterator[tuple[str, str]]:
    """What the peaks leave out."""
    if plan.origin.from_spec:
        yield "device", f"{plan.origin.device_name}: what kernels allocate as they run is not counted"
    for text in plan.untried:
        yield "not counted", f"what {text} allocates while it runs"


def _tuned(plan: PlanData) -> Iterator[tuple[str, str]]:
    """Which schedules real steps tried, and how long these took."""
    if (record := plan.tuning) is None:
        return
    yield "tuned", str(record)
    if len(record.tried) > 1:
        every = [f"{format_time(round(each.seconds * 1e9))} ({each.overhead:+.1%})" for each in record.tried]
        every[0] += " planned"
        every[record.winner] += ", stays"
        yield "tried", "; ".join(every)


def _moves(plan: PlanData) -> Iterator[tuple[str, str]]:
    """What waits in host memory, and how long the step waits for it."""
    graphs = [plan.parts[number] for number in plan.places] or [plan]
    if not any(each.schedule.moves for each in graphs):
        return
    from hybridremat.plans.judging import timed_moves

    known = ((each, each.details) for each in graphs)
    took = [timed_moves(each, its) for each, its in known if its is not None and its.link is not None]
    total = max(1, sum(each.total for each in took))
    busy = max(sum(each.out for each in took), sum(each.back for each in took)) / total
    waits = sum(each.waits_out + each.waits_back for each in took) / total
    values = sum(len(each.schedule.moves) for each in graphs)
    where = f"{values} values, {format_bytes(plan.host_bytes)}, in {plan.request.offload}"
    yield "moves", f"{where}; the link is busy for {busy:.0%} of the step, which waits for it for {waits:.1%}"


def _own_checkpoints(plan: PlanData) -> Iterator[tuple[str, str]]:
    """What the model's own checkpointing would take without a plan."""
    graphs = [each.details.graph for each in (plan, *plan.parts) if each.details is not None]
    count = sum(len(graph.checkpointed) for graph in graphs)
    if count:
        again = sum(graph.ops[op].time for graph in graphs for op in graph.checkpointed)
        plain = sum(schedule_time(graph, plain_schedule(graph)) for graph in graphs)
        yield (
            "own checkpoints",
            f"not followed; without a plan they run {count} ops again, {again / max(1, plain):+.1%} time",
        )


def _breaks(plan: PlanData) -> Iterator[tuple[str, str]]:
    for found in plan.breaks:
        place = found.place.rpartition("/")[2] or "an unknown place"
        across = f"{format_bytes(found.crossing_bytes)} cross it and are kept to the end of the step"
        yield "graph break", f"{place}: {across} ({found.reason.splitlines()[0]})"


def _quality(plan: PlanData) -> Iterator[tuple[str, str]]:
    """What made the plan better than its blocks, and what a better one could save."""
    if plan.composed_overhead is not None:
        yield "exchanges", f"across blocks; with their options alone {plan.composed_overhead:+.1%} time"
    if plan.strategy_gap is not None:
        yield plan.request.strategy, strategy_gap_text(plan.strategy_gap)
    if plan.certificate is not None:
        yield "at best", certificate_text(plan.certificate, plan)


def strategy_gap_text(gap: float) -> str:
    """What a strategy proves of its schedule; rounded so that it stays true."""
    if gap == 0:
        return "none of its schedules is faster under this limit, by its count of memory"
    most = math.ceil(1000 * gap) / 10
    return f"none of its schedules saves more than {most:.1f} % of this time, by its count of memory"


def certificate_dict(plan: PlanData) -> dict[str, object]:
    """What is proven of a certified plan, as plain JSON types: bytes, nanoseconds and a fraction."""
    found = plan.certificate
    assert found is not None
    return {
        "limit_bytes": found.limit,
        "time_ns": found.time,
        "lower_bound_ns": found.lower_bound,
        "optimality_gap": found.gap,
        "least_bound_bytes": found.least_bound,
        "predicted_peak_bytes": plan.predicted_peak,
        "cost_model": plan.cost_model,
    }


def certificate_text(found: Certificate, plan: PlanData) -> str:
    """What a certificate says, in a line; what is proven is rounded so that it stays true."""
    gap = math.ceil(1000 * found.gap) / 10
    share = 100 * found.least_bound / max(1, plan.plain_peak)
    return (
        f"no schedule under {format_bytes(found.limit)} saves more than {gap:.1f} % of this time; none goes "
        f"below {format_bytes(found.least_bound)} ({share:.1f} % of plain)"
    )


def _rewrites(plan: PlanData) -> Iterator[tuple[str, str]]:
    """What runs in another way than in plain PyTorch, recomputation apart."""
    executed = _executed(plan)
    if calls := in_place_calls(plan):
        total = sum(len(part.schedule.steps) for part in plan.parts or (plan,))
        yield "in place", f"{calls} of {total} kernel calls write over what they read last"
    if parted := sum(bool(graph.ops[op].variant) for graph, steps in executed for op in steps):
        yield "by parts", f"{parted} kernel calls go by rows, channels or samples, in less workspace"
    gradients = [graph.values[value].bytes for graph, _ in executed for value in graph.leaving]
    if gradients:
        yield "left early", f"{len(gradients)} gradients, {format_bytes(sum(gradients))}"


def in_place_calls(plan: PlanData) -> int:
    """How many kernel calls of a step write over one of their inputs; 0 where details are not known."""
    known = [(part.details, part.schedule) for part in plan.parts or (plan,)]
    return sum(len(MemorySimulator(d.graph).overwritten(schedule)) for d, schedule in known if d is not None)


def _executed(plan: PlanData) -> list[tuple[JointGraph, tuple[int, ...]]]:
    known = [(part.details, part.schedule.steps) for part in plan.parts or (plan,)]
    return [(details.graph, steps) for details, steps in known if details is not None]


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
    return f"{format_bytes(size)} ({size} bytes, {format_share_up(size, plan.plain_peak)} of plain)"


def _cells(row: BlockRow) -> list[Text]:
    block = row.first
    count = f" ×{len(row.blocks)}" if len(row.blocks) > 1 else ""
    cells = [
        row.indices,
        _broken(row.name + count),
        f"{_ops([block])}\n{_option(block)}",
        _values([(record, 1) for record in block.saved], row.prefix),
        _values(block.recomputed, row.prefix),
        "\n".join([*block_bytes(block), *_times([block])]),
    ]
    return [Text(cell) for cell in cells]


def _sums(blocks: Sequence[PlannedBlock]) -> str:
    saved = format_bytes(sum(block.saved_bytes for block in blocks))
    return "\n".join([f"saved {saved}", *_times(blocks)])


def _times(blocks: Sequence[PlannedBlock]) -> list[str]:
    forward = format_time(sum(block.forward_time for block in blocks))
    extra = format_time(sum(block.extra_time for block in blocks))
    return [f"time {forward}", f"extra {extra}"]


def _broken(name: str) -> str:
    """A name in lines of at most ``NAME_WIDTH``, broken after dots and spaces."""
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
    return option_text(block) + (f"\nruns ×{block.forward_runs}" if block.forward_runs > 1 else "")


def _values(values: Sequence[tuple[ValueRecord, int]], prefix: str) -> str:
    """Names and sizes of the largest values, then number and size of the rest."""
    named, rest = largest(values)
    lines = [
        f"{value_name(record, prefix)} {format_bytes(record.bytes)}".strip()
        + (f" ×{times}" if times > 1 else "")
        for record, times in named
    ]
    if rest:
        lines.append(f"+ {len(rest)} more, {format_bytes(sum(record.bytes for record, _ in rest))}")
    return "\n".join(lines) if lines else "–"

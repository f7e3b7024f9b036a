"""The results of the demo, as a table and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hybridremat.units import format_bytes

IN_BACKWARD = "optimizer in backward"
OFFLOADED = "values wait in a file"


@dataclass(frozen=True)
class DemoRow:
    """One model under one limit.

    Attributes
    ----------
    note
        How the limit was chosen.
    plain_eager_peak, measured_peak
        Bytes, the largest of all steps, by allocation records.
    plain_peak
        Bytes of the captured step with nothing recomputed; shares are of this.
    limit, reserve, predicted_peak, needed
        Bytes of the plan; ``needed`` includes the reserve.
    overhead, extra_flops
        Predicted, as fractions.
    time_ratio
        Measured: planned time over plain eager time.
    planning_seconds
        From a fresh model to a wrapped one, capture included.
    differing
        Tensors not equal to those of plain training, bit for bit: ``step 2: gradient head.weight``.
    """

    model: str
    note: str
    plain_eager_peak: int
    plain_peak: int
    limit: int
    reserve: int
    predicted_peak: int
    needed: int
    measured_peak: int
    overhead: float
    extra_flops: float
    time_ratio: float
    planning_seconds: float
    differing: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every number is equal and the limit was kept."""
        return not self.differing and self.measured_peak <= self.limit


def demo_table(rows: Sequence[DemoRow]) -> Table:
    """One row for each model and limit."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("model", min_width=20)
    peaks = ("plain peak\neager", "plain peak\ncaptured", "limit", "predicted\npeak", "measured,\nof limit")
    for title in peaks:
        table.add_column(title, justify="right")
    for title in ("predicted\noverhead", "extra\nflops", "time\nratio", "plan-\nning"):
        table.add_column(title, justify="right")
    table.add_column("bit-\nequal")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def verdict(rows: Sequence[DemoRow], steps: int) -> list[RenderableType]:
    """What the demo shows, in words; or what went wrong."""
    failed = [row for row in rows if not row.passed]
    if failed:
        return [Text("\n".join(_failure(row) for row in failed), style="bold red")]
    saved = max(rows, key=lambda row: 1 - row.measured_peak / row.plain_eager_peak)
    share = saved.measured_peak / saved.plain_eager_peak
    lines = [
        f"Every loss, gradient, buffer and parameter of {steps} optimizer steps is equal, bit for bit, to "
        f"plain training, and no step passed its limit. The smallest took {share:.0%} of the memory of plain "
        f"eager training ({saved.model}).",
        "Peaks are step memory: what is allocated above parameters, optimizer state and inputs; the largest "
        "of all steps. Captured: the same step as one graph, nothing recomputed; limits in % are shares of "
        "it. Time ratio: planned over plain eager, in pairs of steps. Planning includes the capture; the "
        "second limit of a model reuses what was solved for the first.",
    ]
    early = [row for row in rows if row.note == IN_BACKWARD]
    if early:
        lines.append(
            "With the optimizer in the backward (hybridremat.optimizer_in_backward; the limit is the least "
            "feasible + 3 %) gradients are used and dropped one by one: losses, buffers and parameters are "
            "compared, with those of an ordinary loop, times include the optimizer's, and the peak is that "
            "of the steps after the first, which makes the optimizer's state."
        )
    reserves = sorted({row.reserve for row in rows if row.reserve})
    if reserves:
        kept = ", ".join(format_bytes(reserve) for reserve in reserves)
        lines.append(
            f"For the loss outside the model, {kept} are kept free once the forward is over: predicted is "
            "the model's own peak, and below it (≤) the most that the step takes with the loss."
        )
    return [Text("\n".join(lines))]


def _cells(row: DemoRow) -> list[str]:
    with_loss = f"\n≤ {format_bytes(row.needed)}" if row.reserve else ""
    return [
        f"{row.model}\n{row.note}",
        format_bytes(row.plain_eager_peak),
        format_bytes(row.plain_peak),
        f"{format_bytes(row.limit)}\n{row.limit / row.plain_peak:.1%}",
        format_bytes(row.predicted_peak) + with_loss,
        f"{format_bytes(row.measured_peak)}\n{row.measured_peak / row.limit:.1%}",
        f"{row.overhead:+.1%}",
        f"{row.extra_flops:+.1%}",
        f"{row.time_ratio:.2f}",
        f"{row.planning_seconds:.1f} s",
        "yes" if not row.differing else f"NO: {len(row.differing)}",
    ]


def _failure(row: DemoRow) -> str:
    problems = []
    if row.measured_peak > row.limit:
        problems.append(f"a step took {row.measured_peak} bytes, above the limit of {row.limit}")
    if row.differing:
        first = row.differing[0]
        problems.append(f"{len(row.differing)} tensors differ from plain training, the first is {first}")
    return f"{row.model} ({row.note}): {'; '.join(problems)}"

"""Compiled steps of the reference models beside stock Inductor.

    python benchmarks/compiled.py [MODEL …] [--run] [--stock] [-o RESULTS.json]

For each model one frontier is planned, and a plan at every peak that stock Inductor reached
(``data/stock_inductor.csv``: one thread, torch 2.13, CPU; ``--stock`` measures it again). ``--run`` also
builds and runs plans: their measured peaks at five limits, three steps each, and their times against stock's,
in turn. Peaks are shares of plain eager training's recorded peak. Results are written as they come.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from compiled_runs import measured_limits, paired_times
from marks import DATA, recorded_frontier, recorded_models
from rich.console import Console
from rich.table import Table
from stock_inductor import LossAlone, measure_all, returns_loss_alone, subject

import hybridremat
from hybridremat.errors import InfeasibleLimitError

STOCK = DATA / "stock_inductor.csv"
HALF, POINT = 0.5, 1.0  # ours: at most this share of stock's extra flops, or this many percent


@dataclass(frozen=True)
class Stock:
    """What stock Inductor takes in one way of using it; extra flops in percent."""

    method: str
    budget: str
    peak: int
    extra: float


@dataclass(frozen=True)
class Against:
    """A plan at the peak of a stock step; None where there is none."""

    stock: Stock
    peak: int | None
    extra: float | None

    @property
    def reached(self) -> bool:
        """Whether the plan takes no more memory and at most half of the extra flops, or one percent."""
        return self.extra is not None and self.extra <= max(HALF * self.stock.extra, POINT)


def stock_points(model: str) -> tuple[Stock, ...]:
    """The recorded steps of stock Inductor."""
    with STOCK.open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    return tuple(
        Stock(row["method"], row["budget"], int(row["peak_bytes"]), float(row["extra_flops_percent"]))
        for row in rows
    )


def against(found: hybridremat.Frontier, points: tuple[Stock, ...]) -> Iterator[Against]:
    """A plan at the peak of each of some stock steps that no other beats; of equal ones, the first."""
    distinct = {(point.peak, point.extra): point for point in reversed(points)}.values()
    for stock in reversed(distinct):
        if any(p.peak <= stock.peak and p.extra <= stock.extra and p != stock for p in distinct):
            continue
        try:
            plan = found.plan(memory_limit=stock.peak)
        except InfeasibleLimitError:
            yield Against(stock, None, None)
        else:
            yield Against(stock, plan.predicted_peak, 100 * plan.extra_flops)


def cpu_seconds() -> float:
    """Of this process and its children."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def results(name: str, *, run: bool) -> Iterator[dict[str, Any]]:
    """What is known of one model, as it comes: as it is, then returning its loss alone."""
    eager, _ = recorded_frontier(name)
    for alone in (False, True):
        stock = tuple(p for p in stock_points(name) if returns_loss_alone(p.method) is alone)
        if not stock:
            continue
        model, batch = subject(name)
        model = LossAlone(model) if alone else model
        started = cpu_seconds()
        found = hybridremat.frontier(model, kwargs=batch, compiler="inductor", cost_model="flops")
        yield {
            "model": name,
            "eager": eager,
            "loss alone": alone,
            "plain": found.plain_peak,
            "least": found.least.peak,
            "stock_least": {point.method: point.peak for point in sorted(stock, key=lambda p: -p.peak)},
            "op_by_op_least": hybridremat.frontier(model, kwargs=batch, cost_model="flops").least.peak,
            "frontier": found.to_dict()["points"],
            "frontier_cpu_seconds": cpu_seconds() - started,
        }
        for each in against(found, stock):
            yield {"model": name, "eager": eager, "reached": each.reached, **asdict(each)}
        if run and not alone:
            yield from ({"model": name, **row} for row in measured_limits(name, found))
            yield {"model": name, **paired_times(name)}


def point_table(rows: list[dict[str, Any]]) -> Table:
    """Our plans at the peaks of stock Inductor."""
    table = Table(title="extra flops % at the peak of stock Inductor (% of plain eager)")
    for title in ("model", "stock", "budget", "peak", "stock's extra", "our peak", "our extra", "reached"):
        table.add_column(title)
    for row in (row for row in rows if "reached" in row):
        sizes = (row["stock"]["peak"], row["peak"])
        share = [f"{100 * size / row['eager']:.1f}" if size else "–" for size in sizes]
        extra = [f"{size:.1f}" if size is not None else "–" for size in (row["stock"]["extra"], row["extra"])]
        mark = "yes" if row["reached"] else "no"
        how = (row["stock"]["method"], row["stock"]["budget"])
        table.add_row(row["model"], *how, share[0], extra[0], share[1], extra[1], mark)
    return table


def least_table(rows: list[dict[str, Any]]) -> Table:
    """Least peaks."""
    table = Table(title="least peak, % of plain eager; of stock by method")
    for title in ("model", "ours", "op by op", "stock", "ours / stock"):
        table.add_column(title)
    for row in (row for row in rows if "stock_least" in row):
        name = row["model"] + (", loss alone" if row["loss alone"] else "")
        ours, floor = (f"{100 * row[key] / row['eager']:.1f}" for key in ("least", "op_by_op_least"))
        for method, size in row["stock_least"].items():
            stock = f"{100 * size / row['eager']:.1f} ({method})"
            table.add_row(name, ours, floor, stock, f"{row['least'] / size:.2f}")
    return table


def main() -> int:
    """Measure, write and print; 1 if a mark is not reached."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(recorded_models())}")
    parser.add_argument("--run", action="store_true", help="build and run plans as well")
    parser.add_argument("--stock", action="store_true", help="measure stock Inductor first, and record it")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/compiled.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.models or recorded_models():
        if options.stock:
            measure_all(name, STOCK)
        for row in results(name, run=options.run):
            rows.append(row)
            Console(stderr=True).print(row)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(rows, indent=1))
    console = Console(width=150)
    console.print(point_table(rows))
    console.print(least_table(rows))
    return int(not all(row.get("reached", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())

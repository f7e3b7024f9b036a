"""Compiled steps of the reference models beside stock Inductor.

    python benchmarks/compiled.py [MODEL …] [--run] [--stock] [--pages]

For each model one frontier is planned, and a plan at every peak that stock Inductor reached
(``data/stock_inductor.csv``: one thread, torch 2.13, CPU; ``--stock`` measures it again); nothing is built.
``--run`` builds and runs plans instead: their measured peaks at five limits, three steps each, and their
times against stock's, in turn. Rows go to ``data/compiled.csv`` as they come, what is missing without MODEL,
and those of MODEL anew; the tables from them to docs/benchmarks.md; ``--pages`` does only that. Exits with 1
if a plan takes more than it may beside stock. Planning took 7 CPU minutes for GPT-2 with dropout.

Rows without a load are those of 2026-11-22, taken over from the page as it stood: as exact as its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from compiled_page import BESIDE, LEAST, LIMITS, SCRIPT, STOCK, TIMES, part, unreached
from compiled_runs import measured_limits, paired_times
from generated import Row, circumstances, cpu_seconds, gone_on, read_rows, write_part
from marks import DATA, recorded_models
from reference import PAGE
from stock_inductor import LossAlone, measure_all, returns_loss_alone, subject

import hybridremat
from hybridremat.errors import InfeasibleLimitError

ROWS: Final = DATA / "compiled.csv"
COLUMNS: Final = (
    *("model", "part", "kind", "method", "budget", "limit", "peak", "extra", "measured"),
    *("seconds", "compile", "load", "date", "torch"),
)
PLANS, PLANS_ALONE = "plans", "plans, loss alone"
"""Parts that plan and do not build; those that build are of :mod:`compiled_page`."""


@dataclass(frozen=True)
class Stock:
    """What stock Inductor takes in one way of using it; extra flops in percent."""

    method: str
    budget: str
    peak: int
    extra: float


def stock_points(model: str) -> tuple[Stock, ...]:
    """The recorded steps of stock Inductor."""
    rows = [row for row in read_rows(STOCK) if row["model"] == model]
    return tuple(
        Stock(row["method"], row["budget"], int(row["peak_bytes"]), float(row["extra_flops_percent"]))
        for row in rows
    )


def unbeaten(points: tuple[Stock, ...]) -> Iterator[Stock]:
    """The stock steps that no other beats in both; of equal ones, the first."""
    distinct = {(point.peak, point.extra): point for point in reversed(points)}.values()
    for stock in reversed(distinct):
        if not any(p.peak <= stock.peak and p.extra <= stock.extra and p != stock for p in distinct):
            yield stock


def planned(name: str, *, alone: bool) -> Iterator[Row]:
    """A model's least peaks, compiled and op by op, and plans at the peaks of stock steps; none is built."""
    model, batch = subject(name)
    model = LossAlone(model) if alone else model
    how: dict[str, Any] = {"kwargs": batch, "cost_model": "flops", "progress": False}
    started = cpu_seconds()
    found = hybridremat.frontier(model, compiler="inductor", **how)
    seconds = round(cpu_seconds() - started, 1)
    yield {"kind": LEAST, "method": "inductor", "peak": found.least.peak, "seconds": seconds}
    yield {"kind": LEAST, "method": "op by op", "peak": hybridremat.frontier(model, **how).least.peak}
    for stock in unbeaten(tuple(p for p in stock_points(name) if returns_loss_alone(p.method) is alone)):
        row = {"kind": BESIDE, "method": stock.method, "budget": stock.budget, "limit": stock.peak}
        try:
            plan = found.plan(memory_limit=stock.peak)
        except InfeasibleLimitError:
            yield row
        else:
            yield {**row, "peak": plan.predicted_peak, "extra": round(100 * plan.extra_flops, 2)}


def measured(name: str, what: str) -> list[Row]:
    """The rows of one part of a model, made in this process."""
    import torch

    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    if what == LIMITS:
        rows = measured_limits(name)
    elif what == TIMES:
        rows = paired_times(name)
    else:
        rows = planned(name, alone=what == PLANS_ALONE)
    return [{"model": name, "part": what, "kind": what, **row, **circumstances(load)} for row in rows]


def tasks(names: list[str], *, run: bool) -> list[tuple[str, str]]:
    """The parts of models that plan, or those that build and run."""
    if run:
        return [(name, what) for name in names for what in (TIMES, LIMITS)]
    alone = [n for n in names if any(returns_loss_alone(each.method) for each in stock_points(n))]
    return [*((name, PLANS) for name in names), *((name, PLANS_ALONE) for name in alone)]


def main() -> int:
    """Measure what is asked for, write the page; 1 if a plan takes more than it may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(recorded_models())}")
    parser.add_argument("--run", action="store_true", help="build and run plans instead")
    parser.add_argument("--stock", action="store_true", help="measure stock Inductor first, and record it")
    parser.add_argument("--pages", action="store_true", help="only write the page from the rows")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(*options.here)))
        return 0
    names = options.models or [*recorded_models()]
    for name in names if options.stock else ():
        measure_all(name, STOCK)
    asked = [] if options.pages else tasks(names, run=options.run)
    rows = gone_on(__file__, ROWS, COLUMNS, asked, again=bool(options.models))
    write_part(PAGE, SCRIPT, part(rows))
    failures = [*unreached([row for row in rows if (row["model"], row["part"]) in asked])]
    print(*failures, sep="\n", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

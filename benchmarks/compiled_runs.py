"""Plans of compiled steps, built and run: their memory against the limit, their time against stock's."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from generated import Row
from stock_inductor import subject

import hybridremat
from hybridremat.analysis.measure import loss_of

LIMITS, STEPS, PAIRS = 5, 3, 20
SHARES = ("100%", "50%")


def measured_limits(name: str) -> Iterator[Row]:
    """Measured and predicted peaks at limits spread evenly from the least to the plain step; bytes."""
    model, batch = subject(name)
    found = hybridremat.frontier(
        model, kwargs=batch, compiler="inductor", cost_model="flops", progress=False
    )
    low, high = found.least.peak, found.plain_peak
    for limit in (low + (high - low) * number // (LIMITS - 1) for number in range(LIMITS)):
        model, batch = subject(name)
        hybridremat.wrap(model, kwargs=batch, plan=found.plan(memory_limit=limit))
        peaks = [hybridremat.measure(model, kwargs=batch, repeats=1).peak for _ in range(STEPS)]
        plan = hybridremat.get_plan(model)
        yield {"limit": limit, "peak": plan.predicted_peak, "measured": json.dumps(peaks)}
        torch.compiler.reset()


def paired_times(name: str) -> Iterator[Row]:
    """CPU time of steps under shares of the plain peak as ratios to stock's: medians of pairs, in turn.

    With the overhead that is predicted, in percent, and the seconds of planning and of compilation.
    """
    stock, batch = subject(name)
    stock.compile()
    for limit in SHARES:
        model, _ = subject(name)
        try:
            hybridremat.wrap(model, kwargs=batch, memory_limit=limit, compiler="inductor", progress=False)
        except hybridremat.InfeasibleLimitError:
            continue
        ratios = [_seconds(model, batch) / _seconds(stock, batch) for _ in range(PAIRS + 1)][1:]
        plan = hybridremat.get_plan(model)
        yield {
            "limit": limit,
            "peak": plan.predicted_peak,
            "extra": round(100 * plan.overhead, 2),
            "measured": round(statistics.median(ratios), 3),
            "seconds": round(plan.planning_seconds, 1),
            "compile": round(plan.timings.get("compile", 0.0), 1),
        }


def _seconds(model: torch.nn.Module, batch: dict[str, Any]) -> float:
    """CPU time of one step."""
    model.zero_grad()
    started = time.process_time()
    loss_of(model(**batch)).backward()
    return time.process_time() - started

"""Plans of compiled steps, built and run: their memory against the limit, their time against stock's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from stock_inductor import subject

import hybridremat

LIMITS, STEPS, PAIRS = 5, 3, 20


def measured_limits(name: str, found: hybridremat.Frontier) -> Iterator[dict[str, Any]]:
    """Measured and predicted peak at limits spread evenly from the least to the plain step."""
    low, high = found.least.peak, found.plain_peak
    for limit in (low + (high - low) * number // (LIMITS - 1) for number in range(LIMITS)):
        model, batch = subject(name)
        hybridremat.wrap(model, kwargs=batch, plan=found.plan(memory_limit=limit))
        peaks = [hybridremat.measure(model, kwargs=batch, repeats=1).peak for _ in range(STEPS)]
        plan = hybridremat.get_plan(model)
        kept = max(peaks) <= limit
        yield {"limit": limit, "predicted": plan.predicted_peak, "measured": peaks, "kept": kept}
        torch.compiler.reset()


def paired_times(name: str) -> dict[str, Any]:
    """CPU time of steps at 100 % and 50 %, as ratios to stock Inductor's: medians of pairs, in turn."""
    stock, batch = subject(name)
    stock.compile()
    found: dict[str, Any] = {}
    for limit in ("100%", "50%"):
        model, _ = subject(name)
        try:
            hybridremat.wrap(model, kwargs=batch, memory_limit=limit, compiler="inductor")
        except hybridremat.InfeasibleLimitError:
            continue
        ratios = [_seconds(model, batch) / _seconds(stock, batch) for _ in range(PAIRS + 1)][1:]
        plan = hybridremat.get_plan(model)
        found[f"time ratio at {limit}"] = statistics.median(ratios)
        found[f"predicted overhead at {limit}"] = plan.overhead
        found[f"planning seconds at {limit}"] = plan.planning_seconds
        found[f"compile seconds at {limit}"] = plan.timings.get("compile")
    return found


def _seconds(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """CPU time of one step."""
    model.zero_grad()
    started = time.process_time()
    output = model(**batch)
    (output if isinstance(output, torch.Tensor) else output.loss).backward()
    return time.process_time() - started

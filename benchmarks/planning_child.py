"""CPU seconds until one model's first step has run, in a process of its own.

    python benchmarks/planning_child.py MODEL CHANGES (plain | planned) LIMIT

``CHANGES`` is JSON. Prints a row as JSON: seconds of CPU of the process and of its children, by stage where
it is planned. Wall time says little where other processes run, and nothing of worker processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def cpu_seconds() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


time.perf_counter = cpu_seconds  # planning times its stages by this clock

import torch  # noqa: E402  (after the clock)

import hybridremat  # noqa: E402
from hybridremat.analysis.measure import loss_of  # noqa: E402
from hybridremat.zoo.models import reference_model  # noqa: E402


def plain(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """What a first step takes that is captured and not planned."""
    compiled = torch.compile(model, backend="aot_eager")
    started = cpu_seconds()
    loss_of(compiled(**batch)).backward()
    return {"first_step": cpu_seconds() - started}


def planned(model: torch.nn.Module, batch: dict[str, Any], limit: str) -> dict[str, Any]:
    """What planning takes, and the first step after it."""
    started = cpu_seconds()
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, cost_model="flops", progress=False)
    wrapped = cpu_seconds()
    loss_of(model(**batch)).backward()
    plan = hybridremat.get_plan(model)
    return {
        "planning": wrapped - started,
        "first_step": cpu_seconds() - wrapped,
        "stages": plan.timings,
        "overhead": plan.overhead,
        "ops": len(plan.schedule.steps),
    }


def main() -> None:
    """Measure what the arguments name."""
    name, changes, how, limit = sys.argv[1:]
    torch.set_num_threads(1)
    model, batch = reference_model(name, 0.0, json.loads(changes))
    loss_of(model(**batch)).backward()  # what the first kernels of a process take is not planning
    model.zero_grad()
    found = plain(model, batch) if how == "plain" else planned(model, batch, limit)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

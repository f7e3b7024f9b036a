"""What further lengths of one model take with ``dynamic=None``, in a process of its own.

    python benchmarks/sizes_child.py MODEL CHANGES LIMIT LENGTHS

``CHANGES`` and ``LENGTHS`` are JSON: the first length is captured as it is, the second one with symbols.
Prints JSON, an object for each length: seconds of CPU of planning, captures and schedules by then, overhead
and limit in bytes, and the same of a plan of that length's own under this limit; at 100 % also the seconds
of a step, and of that of a model whose every length is captured by itself.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import hybridremat
from hybridremat.analysis.measure import loss_of
from hybridremat.runtime.planned_call import planned_call
from hybridremat.zoo.models import reference_model

HOW: dict[str, Any] = {"cost_model": "flops", "progress": False, "workers": 1}
PAIRS = 7
"""Steps of each of two models, one after the other."""


def cpu_seconds() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def step_seconds(models: list[nn.Module], batch: dict[str, Tensor]) -> list[float]:
    """The median of each model's steps, which take turns."""
    found: list[list[float]] = [[] for _ in models]
    for _ in range(PAIRS + 1):
        for model, times in zip(models, found, strict=True):
            started = time.perf_counter()
            loss_of(model(**batch)).backward()
            times.append(time.perf_counter() - started)
            model.zero_grad(set_to_none=True)
    return [statistics.median(each[1:]) for each in found]


def figures(model: nn.Module, plain: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    """What one length takes."""
    started = cpu_seconds()
    plan = hybridremat.prepare(model, kwargs=batch)
    seconds = cpu_seconds() - started
    call = planned_call(model)
    assert call is not None and call.sizes is not None and plan is not None
    graphs, schedules = call.sizes.counts()
    started = cpu_seconds()
    own = hybridremat.plan(plain, kwargs=batch, memory_limit=plan.memory_limit, **HOW)
    return {
        "seconds": seconds,
        "captures": graphs,
        "schedules": schedules,
        "overhead": plan.overhead,
        "limit": plan.memory_limit,
        "own_seconds": cpu_seconds() - started,
        "own_overhead": own.overhead,
    }


def main() -> None:
    """Measure what the arguments name."""
    name, changes, limit, lengths = sys.argv[1:]
    torch.set_num_threads(1)
    model, batch = reference_model(name, 0.1, json.loads(changes))
    plain, static = copy.deepcopy(model), copy.deepcopy(model)
    cuts = [
        {key: each[:, :length].contiguous() for key, each in batch.items()} for length in json.loads(lengths)
    ]
    hybridremat.wrap(model, kwargs=cuts[0], memory_limit=limit, dynamic=None, **HOW)
    if limit == "100%":
        hybridremat.wrap(static, kwargs=cuts[0], memory_limit=limit, **HOW)
    found = []
    for cut in cuts[1:]:
        row = figures(model, plain, cut)
        if limit == "100%" and len(found) % 3 == 0:
            hybridremat.prepare(static, kwargs=cut)
            row["step"], row["static_step"] = step_seconds([model, static], cut)
        found.append(row)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

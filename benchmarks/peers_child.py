"""One way to train one model, measured in a process of its own.

    python benchmarks/peers_child.py MODEL METHOD SETTING DEVICE PAIRS

prints JSON rows: peak, flops, gradients against eager's and float64's, time against eager's in pairs. With
the setting ``planned`` a strategy's frontier is planned, and nothing runs.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from peers_methods import METHODS, OURS, Batch, EachRun, NotApplicableError
from stock_inductor import subject
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hybridremat
from hybridremat.analysis.measure import loss_of

SEED = 1
SHARES = (90, 80, 70, 60, 50, 40, 30, 20)


def gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The gradients of one step, and its loss."""
    model.zero_grad()
    torch.manual_seed(SEED)
    loss = loss_of(model(**batch))
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach().clone(), **found}


def correct_names(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that an unprepared model has."""
    marks = ("_orig_mod.", ".0.in_segments")
    return {name.replace(marks[0], "").replace(marks[1], ""): each for name, each in found.items()}


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of all gradients from the exact ones, relative to the norm of these."""
    apart = sum(float((found[name].double() - each).square().sum()) for name, each in exact.items())
    return math.sqrt(apart / sum(float(each.double().square().sum()) for each in exact.values()))


def against_eager(name: str, model: nn.Module, plain: nn.Module, batch: Batch) -> dict[str, Any]:
    """Whether gradients are equal bit for bit, and if not, how far from float64 beside eager's."""
    ours, eager = correct_names(gradients(model, batch)), gradients(plain, batch)
    if ours.keys() != eager.keys():
        return {"gradients": "missing"}
    if all(torch.equal(ours[key], eager[key]) for key in eager):
        return {"gradients": "equal"}
    if "_" in name:  # float64 draws other random numbers
        return {"gradients": "differ", "error": distance(ours, eager)}
    doubled = {key: each.double() if each.is_floating_point() else each for key, each in batch.items()}
    exact = gradients(copy.deepcopy(plain).double(), doubled)
    return {
        "gradients": "differ",
        "error": distance(ours, exact),
        "eager_error": distance(eager, exact),
    }


def seconds_of(model: nn.Module, batch: Batch, device: str) -> float:
    """CPU seconds of a step; on a GPU, seconds by its events."""
    model.zero_grad()
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        loss_of(model(**batch)).backward()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000
    started = time.process_time()
    loss_of(model(**batch)).backward()
    return time.process_time() - started


def attention_flops(query: Sequence[int], key: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products of CPU's flash attention, which PyTorch's counter does not know."""
    return 4 * math.prod(query) * key[-2]


def attention_backward_flops(_: Any, query: Sequence[int], key: Sequence[int], *__: Any, **___: Any) -> int:
    """The five products of its backward."""
    return 10 * math.prod(query) * key[-2]


def flops_of(model: nn.Module, batch: Batch) -> int:
    """Flops of a step that runs op by op."""
    aten = torch.ops.aten
    more = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    }
    model.zero_grad()
    with FlopCounterMode(display=False, custom_mapping=more) as counter:
        loss_of(model(**batch)).backward()
    return counter.get_total_flops()


def measured(name: str, title: str, setting: str, device: str, pairs: int) -> dict[str, Any]:
    """The figures of one way."""
    torch.set_num_threads(1)
    method = {**METHODS, **OURS}[title]
    (model, batch), (plain, _) = subject(name), subject(name)
    model, plain = model.to(device), plain.to(device)
    batch = {key: each.to(device) for key, each in batch.items()}
    eager_flops = flops_of(plain, batch)
    gradients(model, batch)  # what a first step sets in a model would be compiled, and counted, again
    started = time.process_time()
    compiler = method.prepare(model, batch, setting)
    gradients(model, batch)
    took = time.process_time() - started
    found = hybridremat.measure(model, kwargs=batch, repeats=1)
    plan = hybridremat.get_plan(model) if title in OURS else None
    if plan is not None:
        flops = round(eager_flops * (1 + plan.extra_flops))
    else:
        flops = flops_of(model, batch) if compiler is None else compiler.flops
        flops += eager_flops - compiler.replaced if isinstance(compiler, EachRun) else 0
    turns = [(seconds_of(plain, batch, device), seconds_of(model, batch, device)) for _ in range(pairs)]
    return {
        "peak_bytes": found.peak,
        "predicted_bytes": plan.predicted_peak if plan else None,
        "flops": flops,
        "extra_flops_percent": round(100 * (flops / eager_flops - 1), 3),
        **against_eager(name, model, plain, batch),
        "time_ratio": round(statistics.median(b / a for a, b in turns), 4) if turns else None,
        "prepared_seconds": round(took, 1),
    }


def planned(name: str, strategy: str) -> list[dict[str, Any]]:
    """What a strategy plans under each share of the plain step's memory, and its least."""
    torch.set_num_threads(1)
    model, batch = subject(name)
    started = time.process_time()
    how: dict[str, Any] = {"kwargs": batch, "cost_model": "flops", "workers": 1, "progress": False}
    try:
        found = hybridremat.frontier(model, strategy=strategy, **how)
    except hybridremat.GraphSizeError as error:
        return [{"gradients": f"not applicable: {error}"}]
    took = round(time.process_time() - started, 1)
    limits = [found.plain_peak * share // 100 for share in SHARES]
    points = [found.at(memory_limit=limit) for limit in limits if limit >= found.least.peak]
    distinct = dict.fromkeys((found.least, *points))
    return [
        {
            "setting": str(point.peak),
            "predicted_bytes": point.peak,
            "extra_flops_percent": round(100 * point.extra_flops, 3),
            "prepared_seconds": took,
        }
        for point in distinct
    ]


def main(name: str, title: str, setting: str, device: str, pairs: str) -> list[dict[str, Any]]:
    """The rows of one call: several where a strategy is only planned."""
    if setting == "planned":
        return planned(name, title)
    try:
        return [measured(name, title, setting, device, int(pairs))]
    except NotApplicableError as error:
        return [{"gradients": f"not applicable: {error}"}]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

"""What a wrapped model holds between steps, by the allocation records of many steps in a row."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

import hybridremat
from support.quick_planning import quick_planning
from support.training import loss_in, small, train

HOW = {"cost_model": "flops", "workers": 1, "progress": False}
MARK = "## end of step"


def levels(step, count: int) -> tuple[list[int], list[int]]:
    """Bytes that are held after each of many calls, above those after the first, and each call's peak."""
    gc.collect()
    gc.disable()  # what is held by a cycle alone is held
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(count):
                step()
                with record_function(MARK):
                    pass
    finally:
        gc.enable()
    events, pending = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
        elif event.name == MARK:
            events.append((event.start_time_ns, None))
    level, held, peaks, peak = 0, [], [], 0
    for _, size in sorted(events, key=lambda event: event[0]):
        if size is None:
            held.append(level)
            peaks.append(peak)
            peak = level
        else:
            level += size
            peak = max(peak, level)
    return [after - held[0] for after in held], peaks


def wrapped(name):
    """A plain model, its copy at the least limit, and their batch."""
    model, batch = small(name)
    with quick_planning():
        least = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW).least_peak
        planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=least, **HOW)
    assert hybridremat.get_plan(planned).extra_flops > 0
    return model, planned, batch


def stepper(model, batch):
    """A whole training step; the first is made, so that gradients and optimizer states are there."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss_in(model(**batch)).backward()
        optimizer.step()

    step()
    return step


@pytest.mark.parametrize("name", ["convnet", pytest.param("transformer", marks=pytest.mark.slow)])
def test_fifty_steps_hold_what_the_first_holds(name, line):
    plain, planned, batch = wrapped(name)
    held, peaks = levels(stepper(planned, batch), 50)
    assert held == [0] * 50
    assert len(set(peaks[1:])) == 1
    plain_held, plain_peaks = levels(stepper(plain, batch), 5)
    assert plain_held == [0] * 5
    assert max(peaks) <= hybridremat.get_plan(planned).memory_limit < min(plain_peaks)
    line(
        "Robustness",
        f"50 steps ({name})",
        "no byte more after the 50th than after the first; one and the same peak",
        remark=f"{peaks[-1]} bytes in each step (plain {plain_peaks[-1]})",
    )


@pytest.mark.slow
def test_a_forward_without_a_backward_gives_its_memory_back(line):
    _, planned, batch = wrapped("transformer")
    step = stepper(planned, batch)
    held, _ = levels(lambda: planned(**batch), 20)
    assert held == [0] * 20
    held, _ = levels(lambda: (planned(**batch), step()), 5)
    assert held == [0] * 5
    line("Robustness", "a forward without a backward", "its memory is given back once its output is dropped")


class Failing(nn.Module):
    """Fails in the middle of its forward or of its backward, when told to."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 64) for _ in range(3))
        self.back = nn.ModuleList(nn.Linear(64, 16) for _ in range(3))

    def forward(self, x, rows):
        for wide, narrow in zip(self.layers, self.back, strict=True):
            x = x + functional.dropout(narrow(functional.gelu(wide(fragile(x)))), 0.1)
            x = x.index_select(0, rows)
        return (x.pow(2).mean(),)


FAIL_AT = []


@torch.library.custom_op("hybridremat_tests::fragile", mutates_args=())
def fragile(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("hybridremat_tests::fragile_backward", mutates_args=())
def fragile_backward(x: torch.Tensor) -> torch.Tensor:
    if FAIL_AT and not FAIL_AT.pop():
        FAIL_AT.clear()
        raise ValueError("told to fail")
    return x.clone()


for op in (fragile, fragile_backward):
    op.register_fake(torch.empty_like)
fragile.register_autograd(lambda context, gradient: fragile_backward(gradient))


@pytest.mark.parametrize("place", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_the_step_after_a_failed_one(place, line):
    torch.manual_seed(0)
    plain, batch = Failing(), {"x": torch.randn(64, 16), "rows": torch.arange(64).flip(0)}
    with quick_planning():
        least = hybridremat.plan(plain, kwargs=batch, memory_limit="100%", **HOW).least_peak
        planned = hybridremat.wrap(copy.deepcopy(plain), kwargs=batch, memory_limit=least, **HOW)
    bad = {**batch, "rows": torch.arange(64) + 8}

    def fail(model):
        if place == "backward":
            FAIL_AT[:] = [False, True]  # the second of three
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            model(**(bad if place == "forward" else batch))[0].backward()

    results = []
    for model in (plain, planned):
        torch.manual_seed(3)
        train(model, batch, steps=1, measure=False)
        fail(model)
        model.zero_grad()
        results.append(train(model, batch, steps=2))
    assert results[0].differences(results[1]) == []
    assert max(results[1].peaks) <= least
    held, _ = levels(lambda: (fail(planned), planned.zero_grad(), gc.collect()), 6)
    assert held == [0] * 6
    line(
        "Robustness",
        f"an exception in the middle of the {place}",
        "the next step is bit-equal to plain's; nothing of the failed one is kept",
    )

"""Wrapping small models in tests, and what must be left alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import hybridremat
from support.training import small

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


def wrap(model, batch=None, limit="80%", **how):
    return hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **HOW, **how)


def least_limit(model, batch, **how):
    with pytest.raises(hybridremat.InfeasibleLimitError) as caught:
        wrap(model, batch, 1, **how)
    return caught.value.least


def three_limits(model, batch, **how):
    """80 % of the plain step, half-way to the least feasible limit, and that limit."""
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW, **how)
    least, plain = plan.least_peak, plan.plain_peak
    easy = max(least, plain * 8 // 10)
    return [easy, (easy + least) // 2, least]


@cache
def frontier_of(name, strategy="hybrid"):
    """The frontier of a small model, made once in a process: several tests look at it."""
    model, batch = small(name)
    return hybridremat.frontier(model, kwargs=batch, strategy=strategy, **HOW)


def state_of(model):
    """Everything that a failed or finished call must leave alone."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (id(t), t.detach().clone()) for name, t in tensors.items()},
        {name: p.grad for name, p in model.named_parameters()},
        [m.training for m in model.modules()],
        {k: v for k, v in vars(model).items() if k not in ("_parameters", "_buffers", "_modules")},
        torch.get_rng_state(),
    )


def assert_untouched(before, model):
    after = state_of(model)
    assert before[0].keys() == after[0].keys()
    pairs = zip(before[0].values(), after[0].values(), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    assert all(before[1][name] is gradient for name, gradient in after[1].items())
    assert before[2] == after[2]
    assert before[3].keys() == after[3].keys() and before[3].get("_compiled_call_impl") is None
    assert after[3].get("_compiled_call_impl") is None
    assert torch.equal(before[4], after[4])

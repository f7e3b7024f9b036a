"""Models put together at random, held to plain training at three limits, bit for bit and byte for byte."""

from __future__ import annotations

import copy

import torch
from extreme_schedules import run_extremely
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from quick_planning import quick_planning
from random_models import Recipe, build, recipes
from torch import nn
from torch.nn import functional
from training import Trained, train, train_plain

import hybridremat

HOW = {"cost_model": "flops", "workers": 1, "progress": False}
FEW = settings(max_examples=6, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)


def trained_plain(model, batch, steps: int) -> Trained:
    """Plain training; leaves an example out that plain training refuses."""
    try:
        return train_plain(model, batch, steps=steps)
    except RuntimeError:  # it changes in place what its own backward needs, or nothing in it learns
        assume(False)
        raise


def hold_to_plain(recipe: Recipe, steps: int) -> float:
    """Train plain, and planned at an easy, a middle and the least limit; the least as a share of plain."""
    model, batch = build(recipe)
    expected = trained_plain(model, batch, steps)
    with quick_planning():
        planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit="100%", **HOW)
        plan = hybridremat.get_plan(planned)
        least, plain = plan.least_peak, plan.plain_peak
        for limit in dict.fromkeys((plain, (least + plain) // 2, least)):
            if limit != plain:
                planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=limit, **HOW)
            trained = train(planned, batch, steps=steps)
            assert expected.differences(trained) == [], limit
            assert max(trained.peaks) <= limit, (trained.peaks, limit)
    return least / plain


@FEW
@given(recipes(longest=6))
def test_small_random_models(recipe):
    hold_to_plain(recipe, steps=2)


@FEW
@given(recipes(longest=10), st.sampled_from([0.5, 1.0]))
def test_schedules_that_nobody_would_choose(recipe, share):
    model, batch = build(recipe)
    expected = trained_plain(model, batch, steps=2)
    extreme, planner = run_extremely(model, batch, recipe.seed, share)
    trained = train(extreme, batch, steps=2)
    assert expected.differences(trained) == []
    assert max(trained.peaks) <= planner.predicted


class Wasteful(nn.Module):
    """Draws numbers that it does not use, before numbers that it uses."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        torch.rand(3)
        unused = functional.dropout(x, 0.5)
        del unused
        return functional.dropout(self.layer(x), 0.5).pow(2).mean()


def test_draws_that_nothing_reads_are_drawn():
    torch.manual_seed(0)
    model, batch = Wasteful(), {"x": torch.randn(4, 8)}
    planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit="100%", **HOW)
    assert train_plain(model, batch).differences(train(planned, batch)) == []

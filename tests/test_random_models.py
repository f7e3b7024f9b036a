"""Models put together at random, held to plain training at three limits, bit for bit and byte for byte."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.compiler.rng_replay import replay
from support.extreme_steps import run_extremely
from support.random_models import build, recipes
from support.random_training import FEW, HOW, hold_to_plain, trained_plain
from support.training import train, train_plain


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


def test_a_replay_draws_as_before_and_leaves_the_generator_alone():
    state, first = torch.get_rng_state(), torch.rand(4)
    torch.rand(9)
    before = torch.get_rng_state()
    assert torch.equal(replay(state, torch.rand, 4), first)
    with pytest.raises(RuntimeError):
        replay(state, torch.rand, -1)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_that_nothing_reads_are_drawn():
    torch.manual_seed(0)
    model, batch = Wasteful(), {"x": torch.randn(4, 8)}
    planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit="100%", **HOW)
    assert train_plain(model, batch).differences(train(planned, batch)) == []

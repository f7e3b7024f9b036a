"""Calls that stay one op, with other abilities: gradients in the backward, files, strategies, Inductor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from support.compiled import error, gradients, needs_compiler, nothing_kept_by_inductor
from support.early_gradients import EARLY, adamw, assert_equal, trained
from support.training import train, train_plain
from support.wrapping import HOW, least_limit


class Doubled(torch.autograd.Function):
    """Keeps what it reads, and a tensor of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        y = torch.tanh(x @ weight)
        ctx.save_for_backward(x, weight, y)
        return 2 * y

    @staticmethod
    def backward(ctx, grad):
        x, weight, y = ctx.saved_tensors
        inner = 2 * grad * (1 - y * y)
        return inner @ weight.t(), x.t() @ inner


@hybridremat.opaque
def doubled(x, weight):
    return Doubled.apply(x, weight)


class Tagger(nn.Module):
    """Words, a recurrent module, a function of one's own, dropout, and a loss over words."""

    def __init__(self, kind, p) -> None:
        super().__init__()
        self.p = p
        self.words, self.cells = nn.Embedding(50, 8), kind(8, 8, num_layers=2)
        self.own = nn.Parameter(torch.randn(8, 8) / 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.out = nn.Linear(8, 50)

    def forward(self, tokens, labels):
        x = self.cells(self.words(tokens))[0]
        x = x + doubled(x.flatten(0, 1), self.own).view_as(x)
        for layer in self.layers:
            x = x + functional.dropout(functional.gelu(layer(x)), self.p, self.training)
        return functional.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def made(kind=nn.LSTM, p=0.2):
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (12, 6))
    return Tagger(kind, p), {"tokens": tokens, "labels": tokens.roll(1)}


def require_same(model, batch, limit, **how):
    expected = train_plain(model, batch)
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **HOW, **how)
    found = train(model, batch)
    assert expected.differences(found) == []
    assert max(found.peaks) <= hybridremat.get_plan(model).memory_limit


@pytest.mark.parametrize("kind", [nn.GRU, pytest.param(nn.LSTM, marks=pytest.mark.slow)])
def test_gradients_in_the_backward(kind):
    model, batch = made(kind)
    plain = copy.deepcopy(model)
    expected, _ = trained(plain, batch, adamw(plain.parameters()), steps=3)
    optimizer = hybridremat.optimizer_in_backward(model, adamw)
    limit = least_limit(model, batch, gradients="in_backward")
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **EARLY)
    found, peaks = trained(model, batch, optimizer, steps=3)
    assert_equal(found, expected)
    assert max(peaks[1:]) <= limit


@pytest.mark.slow
def test_a_plan_from_a_file(tmp_path):
    model, batch = made()
    limit = least_limit(model, batch)
    hybridremat.plan(model, kwargs=batch, memory_limit=limit, **HOW).save(tmp_path / "plan.json")
    plain = train_plain(model, batch)
    hybridremat.wrap(model, kwargs=batch, plan=tmp_path / "plan.json", progress=False)
    found = train(model, batch)
    assert plain.differences(found) == []
    assert max(found.peaks) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["rockmate", "rotor", "every-block"])
def test_other_strategies(strategy):
    model, batch = made()
    least = hybridremat.frontier(model, kwargs=batch, strategy=strategy, **HOW).points[0].peak
    require_same(model, batch, least, strategy=strategy)


@pytest.mark.slow
def test_a_loss_by_chunks_above():
    """The recurrent module below a loss that goes by chunks: within the limit, the loss nearly the same."""
    model, batch = made()
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=batch, memory_limit="90%", rewrites="chunked", **HOW)
    losses = []
    for each in (plain, model):
        torch.manual_seed(1)
        losses.append(each(**batch))
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert max(train(model, batch).peaks) <= hybridremat.get_plan(model).memory_limit


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_compiled_by_inductor(kind):
    model, batch = made(kind, p=0.0)  # Inductor draws other masks
    plain, how = copy.deepcopy(model), {"compiler": "inductor", "on_infeasible": "least", **HOW}
    with nothing_kept_by_inductor():
        hybridremat.wrap(model, kwargs=batch, memory_limit="90%", **how)
        found, expected = gradients(model, batch), gradients(plain, batch)
        peaks = train(model, batch).peaks[1:]
    assert torch.allclose(found[0], expected[0], rtol=1e-5)
    assert error(found[1], {name: each.double() for name, each in expected[1].items()}) < 1e-4
    assert max(peaks) <= hybridremat.get_plan(model).memory_limit

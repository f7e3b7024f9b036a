"""A model's own checkpointing, and derivatives inside a forward that breaks."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridremat
from hybridremat.errors import CaptureError

HOW = {"memory_limit": "100%", "cost_model": "flops", "workers": 1, "progress": False}


class Net(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.layer(x).pow(2).mean()
        return checkpoint(self.layer, x, use_reentrant=self.reentrant).pow(2).mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_told_of_and_changes_no_plan(reentrant, caplog):
    x = torch.randn(16, 8)
    with caplog.at_level(logging.WARNING, "hybridremat"):
        plain = hybridremat.plan(Net(None), args=(x,), **HOW)
        assert "checkpoints" not in caplog.text
        own = hybridremat.plan(Net(reentrant), args=(x,), **HOW)
    assert caplog.text.count("checkpoints") == 1
    assert (own.plain_peak, own.least_peak, own.overhead) == (plain.plain_peak, plain.least_peak, 0)


class Two(Net):
    """Two checkpoints with a graph break between them."""

    def forward(self, x):
        x = checkpoint(self.layer, x, use_reentrant=False)
        torch._dynamo.graph_break()
        return checkpoint(self.layer, x, use_reentrant=False).pow(2).mean()


def own_row(plan):
    return next((line for line in str(plan).splitlines() if line.startswith("own checkpoints")), "")


def test_what_it_would_take_stands_in_the_plan(tmp_path):
    """Two of the step's products of matrices again, of six: a third more, less what other ops take."""
    x = torch.randn(16, 8, requires_grad=True)
    own = hybridremat.plan(Net(False), args=(x,), **HOW)
    found = re.search(r"without a plan they run 3 ops again, \+(\d+\.\d)% time", own_row(own))
    assert found and 28 < float(found[1]) < 34
    own.save(tmp_path / "plan.json")
    assert own_row(hybridremat.Plan.load(tmp_path / "plan.json")) == own_row(own)
    assert own_row(hybridremat.plan(Net(None), args=(x,), **HOW)) == ""


@pytest.mark.parametrize("breaks", [False, True])
def test_it_is_told_once_for_all_shapes_and_graphs(breaks, caplog):
    net = (Two if breaks else Net)(False)
    how = HOW | ({"graph_breaks": "plan"} if breaks else {})
    with caplog.at_level(logging.WARNING, "hybridremat"):
        net = hybridremat.wrap(net, args=(torch.randn(16, 8),), **how)
        for rows in (16, 12, 8):
            net(torch.randn(rows, 8)).backward()
    assert caplog.text.count("checkpoints") == 1
    assert own_row(hybridremat.get_plan(net))


class Derivative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope.pow(2).mean()


class Failing(Derivative):
    def forward(self, x):
        if self.net(x).sum().item() > -1e9:
            raise KeyError("mine")
        return x.sum()


def test_a_derivative_between_graphs_is_a_typed_error_that_says_what_to_do():
    with pytest.raises(
        CaptureError, match=r"test_own_checkpoints\.py:\d+ .*autograd\.grad.*torch\.func\.grad"
    ):
        hybridremat.wrap(Derivative(), args=(torch.randn(4, 1),), graph_breaks="plan", **HOW)


def test_an_error_of_the_model_stays_its_own():
    with pytest.raises(KeyError, match="mine"):
        hybridremat.wrap(Failing(), args=(torch.randn(4, 1),), graph_breaks="plan", **HOW)

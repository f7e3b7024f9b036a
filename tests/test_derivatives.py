"""Forwards that compute derivatives themselves: one graph, and the bits of plain training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import hybridremat
from support.training import train
from support.wrapping import HOW


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 8))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 1)


class Maml(Net):
    first_order = False

    def forward(self, x):
        named = dict(self.net.named_parameters())
        for _ in range(2):
            loss = functional_call(self.net, named, (x,)).square().mean()
            slopes = torch.autograd.grad(loss, list(named.values()), create_graph=not self.first_order)
            named = {key: p - 0.1 * d for (key, p), d in zip(named.items(), slopes, strict=True)}
        return functional_call(self.net, named, (x,)).square().mean()


class FirstOrder(Maml):
    first_order = True


class Penalty(Net):
    def forward(self, x):
        score = self.head(self.net(x))
        (slope,) = torch.autograd.grad(outputs=score.sum(), inputs=x, create_graph=True)
        return score.mean() + (slope.norm(2, dim=1) - 1).square().mean()


class Adaptive(Net):
    """A weight of one loss by the slopes of both."""

    def forward(self, x):
        hidden = self.norm(self.net(x))
        first, second, last = hidden.square().mean(), self.head(hidden).mean(), self.net[3].weight
        (one,) = torch.autograd.grad(first, last, retain_graph=True)
        (other,) = torch.autograd.grad(second, last, retain_graph=True)
        return first + (one.norm() / (other.norm() + 1e-4)).clamp(0, 10) * second


class Constant(Net):
    """No gradient flows through a derivative that was made without ``create_graph``."""

    def forward(self, x):
        hidden = self.net(x)
        (slope,) = torch.autograd.grad(self.head(hidden).square().mean(), hidden, retain_graph=True)
        return (hidden * slope).sum() + slope.square().sum()


def inputs():
    return {"x": torch.randn(16, 8, requires_grad=True)}


@pytest.mark.parametrize("kind", [Maml, FirstOrder, Penalty, Adaptive, Constant])
def test_a_forward_that_differentiates_trains_as_plainly(kind):
    torch.manual_seed(0)
    plain, batch = kind(), inputs()
    model = copy.deepcopy(plain)
    how = {"memory_limit": "70%", "on_infeasible": "least", "graph_breaks": "error", **HOW}
    hybridremat.wrap(model, kwargs=batch, **how)
    plan, found = hybridremat.get_plan(model), train(model, batch)
    assert train(plain, batch).differences(found) == []
    assert max(found.peaks) <= plan.memory_limit


class Normalized(Net):
    def forward(self, x):
        energy = self.head(self.norm(self.net(x)))
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.square().mean() + slope.square().mean()


def test_other_sizes_train_as_plainly():
    torch.manual_seed(0)
    plain = Normalized()
    model, sizes = copy.deepcopy(plain), [torch.randn(rows, 8, requires_grad=True) for rows in (16, 24, 12)]
    hybridremat.wrap(model, (sizes[0],), memory_limit="100%", **HOW)
    for x in sizes:
        torch.manual_seed(1)
        model(x).backward()
        torch.manual_seed(1)
        plain(x).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)


class Requiring(Net):
    """What Dynamo does not follow: a leaf that the forward makes."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        score = self.head(self.net(x))
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + slope.square().mean()


class ByHand(Net):
    def forward(self, x):
        hidden = self.net(x)
        cut = hidden.detach().requires_grad_()
        self.head(cut).square().mean().backward()
        return (hidden * cut.grad).sum()


class Inner(Net):
    """A backward whose gradients stay beside the step."""

    def forward(self, x):
        hidden = self.net(x)
        self.head(hidden.detach()).mean().backward()
        return self.head(hidden).square().mean()


class Advised(Net):
    """As the error says."""

    def forward(self, x):
        slope = grad(lambda given: self.head(self.net(given)).sum())(x.detach())
        return self.head(self.net(x)).mean() + slope.square().mean()


@pytest.mark.parametrize("kind", [Requiring, ByHand])
@pytest.mark.parametrize("how", [{}, {"graph_breaks": "plan"}, {"graph_breaks": "error"}], ids=str)
def test_what_cannot_be_captured_names_what_can(kind, how):
    with pytest.raises(hybridremat.CaptureError, match=r"torch\.func\.grad"):
        hybridremat.plan(kind(), kwargs=inputs(), memory_limit="100%", **HOW, **how)


class Across(Net):
    """Differentiates through a graph before this one, with names that Dynamo's own check does not look at."""

    def forward(self, x):
        hidden = self.net(x)
        torch._dynamo.graph_break()
        loss, weight = self.head(hidden).square().mean(), self.net[3].weight
        (slope,) = torch.autograd.grad(outputs=loss, inputs=[weight], create_graph=True, allow_unused=True)
        return hidden.mean() if slope is None else hidden.mean() + slope.square().mean()


def test_no_derivative_goes_through_another_graph():
    with pytest.raises(hybridremat.DoubleBackwardError, match="create_graph=True"):
        hybridremat.wrap(Across(), kwargs=inputs(), memory_limit="100%", graph_breaks="plan", **HOW)


def test_a_backward_inside_is_refused():
    with pytest.raises(hybridremat.CaptureError, match=r"calls \.backward\(\).*torch\.func\.grad"):
        hybridremat.plan(Inner(), kwargs=inputs(), memory_limit="100%", graph_breaks="error", **HOW)


def test_what_it_names_is_captured():
    assert hybridremat.plan(Advised(), kwargs=inputs(), memory_limit="100%", graph_breaks="error", **HOW)

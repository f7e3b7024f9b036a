"""Errors of capture name parts of the model that the line is not in, and these can be units."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.compiler.parts_beside import parts_beside

HOW = {"cost_model": "flops", "workers": 1, "progress": False, "memory_limit": "100%"}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.narrow(functional.gelu(self.wide(x)))


class Reading(nn.Module):
    """Branches on a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x):
        return self.inner(x) if x.mean() > 0 else -self.inner(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.reading = Mlp(), Reading()

    def forward(self, x):
        return self.reading(x + self.mlp(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = Mlp(), nn.ModuleList(Layer() for _ in range(2))
        self.frozen, self.head = Mlp().requires_grad_(requires_grad=False), nn.Linear(16, 4)

    def forward(self, x):
        x = self.frozen(self.stem(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x).pow(2).mean()


class Differentiating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic, self.other = Mlp(), Mlp()

    def forward(self, x):
        x = self.other(x).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        return slope.pow(2).mean()


def test_parts_beside_a_break_are_units_that_can_be_planned():
    model, x = Model(), torch.randn(4, 16)
    with pytest.raises(hybridremat.CaptureError, match="reading") as caught:
        hybridremat.plan(model, args=(x,), graph_breaks="error", **HOW)
    found = re.search(r"let it run as it is: hybridremat\.wrap_each\(model, (\[.*\]), …\)", str(caught.value))
    assert found is not None and found[1] == "['layers.*.mlp', 'stem', 'layers.*.reading.inner']"
    units = ["layers.*.mlp", "stem", "layers.*.reading.inner"]
    assert len(hybridremat.plan(model, args=(x,), units=units, **HOW).parts) > 1


def test_a_line_that_differentiates_is_told_what_to_leave_out():
    model, x = Differentiating(), torch.randn(4, 16)
    with pytest.raises(
        hybridremat.CaptureError, match=r"differentiate.*wrap_each\(model, \['critic', 'other'\]"
    ):
        hybridremat.plan(model, args=(x,), graph_breaks="plan", **HOW)
    with pytest.raises(hybridremat.CaptureError, match=r"leave out of units= what that line differentiates"):
        hybridremat.plan(model, args=(x,), units=["critic", "other"], **HOW)
    assert hybridremat.plan(model, args=(x,), units="other", **HOW).parts


def test_what_a_sequential_of_the_line_holds_is_named_and_nothing_where_the_line_is_in_all():
    model, x = Reading(), torch.randn(4, 16)
    with pytest.raises(hybridremat.CaptureError) as caught:
        hybridremat.plan(nn.Sequential(model, nn.Linear(16, 4)), args=(x,), graph_breaks="error", **HOW)
    assert "wrap_each(model, ['0.inner'], …)" in str(caught.value)
    assert parts_beside(nn.Linear(2, 2), ValueError("text")) == ""

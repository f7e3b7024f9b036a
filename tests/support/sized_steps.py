"""Models with inputs of many sizes, wrapped with one capture for all, beside plain ones."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

import hybridremat
from support.training import train

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


class Embedded(nn.Module):
    """Has a batch and a length, and a capture for all sizes that takes a sixth of a Transformer's time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.wide = nn.ModuleList(nn.Linear(16, 64) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(64, 16) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = x + narrow(functional.gelu(wide(x)))
        return x.pow(2).mean()


def seeded(size):
    return torch.Generator().manual_seed(size)


def tokens(batch, length):
    return {"tokens": torch.randint(0, 50, (batch, length), generator=seeded(batch * length))}


def rows(batch, width=32):
    return {"x": torch.randn(batch, width, generator=seeded(batch))}


def images(batch):
    drawn = torch.randn(batch, 3, 12, 12, generator=seeded(batch))
    return {"x": drawn, "labels": torch.randint(0, 5, (batch,), generator=seeded(batch))}


def captured(model):
    """The number of captures with symbols, and of schedules that they have emitted."""
    return model._compiled_call_impl.sizes.counts()


def portfolios(model):
    """Of each capture with symbols of a wrapped model."""
    families = model._compiled_call_impl.sizes._families.values()
    return [each.partition.portfolio for family in families for each in family.captures]


def portfolio(model):
    """Of the one capture with symbols of a wrapped model."""
    (found,) = portfolios(model)
    return found


def require_exact(model, plain, batch, steps=1):
    """The step of a wrapped model is that of the plain one, in as many bytes as its plan says."""
    plan = hybridremat.prepare(model, kwargs=batch)
    mine, theirs = train(model, batch, steps=steps), train(plain, batch, steps=steps)
    assert theirs.differences(mine) == []
    assert max(mine.peaks) == plan.predicted_peak <= plan.memory_limit
    assert hybridremat.get_plan(model).predicted_peak == plan.predicted_peak
    return plan


def wrapped(make, draw, share, largest, *others, kept=64):
    """A plain model, and a wrapped one with a limit in bytes at the largest sizes; others are run too.

    ``kept``: its plans and emitted schedules.
    """
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    limit = hybridremat.plan(make(), kwargs=draw(*largest), memory_limit=share, **HOW).memory_limit
    how = {**HOW, "memory_limit": limit, "max_plans": kept}
    hybridremat.wrap(model, kwargs=draw(*largest), dynamic=None, **how)
    for each in others:
        require_exact(model, plain, draw(*each))
    return plain, model

"""Models whose step comes in several graphs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

HOW = {"cost_model": "flops", "workers": 1, "progress": False, "graph_breaks": "plan"}


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.BatchNorm1d(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.narrow(functional.gelu(self.wide(self.norm(x)))))


class Reader(nn.Module):
    """Reads a value in the middle of its forward, and may take another path for it.

    Dynamo compiles nothing again while it stays on its path: a list that grows, or a number that changes
    with every step, would cost a second each time.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.third = Stage(width), Stage(width), Stage(width)

    def forward(self, x, labels):
        x = self.first(x)
        small = (x.detach().mean() < 5).item()
        x = self.second(x) if small else self.third(self.second(x))
        return functional.cross_entropy(x, labels)


def batch(rows=48, width=16, shift=0.0):
    return {"x": torch.randn(rows, width) + shift, "labels": torch.randint(0, width, (rows,))}


class Deep(nn.Module):
    """As many turns as the numbers ask for, each with a break; what crosses them is made by plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.turns, self.stages = 2, nn.ModuleList(Stage(16) for _ in range(2))

    def forward(self, x):
        for turn in range(self.turns):
            x = self.stages[turn % 2](x) * x.detach().abs().mean().item()
        return x.pow(2).mean()


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Deep()

    def forward(self, x):
        return self.inner(x)

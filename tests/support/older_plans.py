"""Plan files that versions of each schema wrote, in tests/data/plans, and the models that they are for.

A file is named after its schema and one of ``ASKED``; ``6-last`` is the last version of schema 6. All were
made with ``cost_model="flops"``, on one thread.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

FOLDER = Path(__file__).resolve().parents[1] / "data" / "plans"
FILES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.iterdir())

ASKED: dict[str, dict[str, Any]] = {
    "plain": {"memory_limit": "95%", "reserve": 64},
    "pins": {"memory_limit": "100%", "policy": {"second.1": "must_recompute"}},
    "breaks": {"memory_limit": "120%", "graph_breaks": "plan"},
    "early": {"memory_limit": "90%", "gradients": "in_backward"},
    "classes": {"memory_limit": "95%"},
    "class-breaks": {"memory_limit": "120%", "graph_breaks": "plan"},
}


def read(file: str) -> dict[str, Any]:
    """The data of a file."""
    data: dict[str, Any] = json.loads(gzip.decompress((FOLDER / f"{file}.json.gz").read_bytes()))
    return data


def asked(file: str) -> str:
    """The name in ``ASKED`` that a file is for."""
    return file.removeprefix("6-last").lstrip("0123456789").removeprefix("-")


class Net(nn.Module):
    """Two hidden layers and a loss, of classes or of distances; with a graph break if it is asked for."""

    def __init__(self, *, breaks: bool, classes: bool) -> None:
        super().__init__()
        self.breaks, self.classes = breaks, classes
        self.first = nn.Sequential(nn.Linear(16, 64), nn.GELU())
        self.second = nn.Sequential(nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.first(x)
        if self.breaks:
            x.detach().sum().item()
        made = self.head(self.second(x))
        return functional.cross_entropy(made, labels) if self.classes else functional.mse_loss(made, labels)


def made(file: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and the batch that a file is for."""
    torch.manual_seed(0)
    name = asked(file)
    classes = name.startswith("class")
    labels = torch.randint(0, 8, (64,)) if classes else torch.randn(64, 8)
    model = Net(breaks=name.endswith("breaks"), classes=classes)
    return model, {"x": torch.randn(64, 16), "labels": labels}

"""Every pair of settings: whether it is refused, on one small model, and the table of the documentation.

python tests/support/setting_pairs.py   # prints the table of docs/reference.md
"""

from __future__ import annotations

import sys
from itertools import combinations
from tempfile import gettempdir
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hybridremat.planning.settings import REFUSED_PAIRS

ALONE: dict[str, dict[str, Any]] = {
    "max_overhead": {"max_overhead": 0.2, "memory_limit": None},
    "reserve": {"reserve": 1000},
    "hold_outputs": {"hold_outputs": True},
    'grad_outputs="all"': {"grad_outputs": "all"},
    'outputs="loss"': {"outputs": "loss"},
    "forwards": {"forwards": 2},
    'on_infeasible="least"': {"on_infeasible": "least"},
    'graph_breaks="plan"': {"graph_breaks": "plan"},
    "policy": {"policy": {"first.1": "must_recompute"}},
    'compiler="inductor"': {"compiler": "inductor"},
    'rewrites="chunked"': {"rewrites": "chunked"},
    'rewrites="none"': {"rewrites": "none"},
    'gradients="in_backward"': {"gradients": "in_backward"},
    'strategy="rockmate"': {"strategy": "rockmate"},
    'strategy="checkmate"': {"strategy": "checkmate"},
    "planning_budget": {"planning_budget": 5},
    "device_spec": {"device_spec": "h100"},
    "units": {"units": ("first", "second")},
    "fsdp": {"fsdp": 2, "units": ("first", "second")},
    'gathers="plan"': {"gathers": "plan"},
    "offload": {"offload": f"file:{gettempdir()}", "memory_limit": "60%"},
    "dynamic=True": {"dynamic": True},
}
"""A value of each setting that is not its default; where ``memory_limit`` is not among them it is 90 %."""


def asked(*names: str) -> dict[str, Any]:
    """The settings of some names together."""
    given: dict[str, Any] = {"memory_limit": "90%"}
    for name in names:
        given |= ALONE[name]
    return given


REFUSED = {frozenset(pair[:2]) for pair in REFUSED_PAIRS}
PAIRS = [pair for pair in combinations(ALONE, 2) if pair[0].split("=")[0] != pair[1].split("=")[0]]
"""Every pair of settings that are not two values of one."""


def table() -> str:
    """The table of docs/reference.md."""
    rows = ["| setting | not together with |", "|---|---|"]
    for name in ALONE:
        others = [f"`{each}`" for each in ALONE if {name, each} in REFUSED]
        rows.append(f"| `{name}` | {', '.join(others) or '–'} |")
    return "\n".join(rows)


class Net(nn.Module):
    """Two layers and a head with more classes than it has features, and a graph break if it is asked for."""

    def __init__(self, *, breaks: bool, loss_alone: bool) -> None:
        super().__init__()
        self.breaks, self.loss_alone = breaks, loss_alone
        self.first = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))
        self.second = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1))
        self.head = nn.Linear(16, 96)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        """The loss, and the logits unless the loss is alone."""
        x = self.first(x)
        if self.breaks:
            x.detach().sum().item()
        logits = self.head(self.second(x))
        loss = functional.cross_entropy(logits, labels)
        return loss if self.loss_alone else (loss, logits)


def made(names: tuple[str, ...]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and a batch for settings of some names."""
    torch.manual_seed(0)
    model = Net(breaks='graph_breaks="plan"' in names, loss_alone='rewrites="chunked"' in names)
    return model, {"x": torch.randn(96, 16), "labels": torch.randint(0, 96, (96,))}


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")

"""A model that asserts something of values, as it is written: PYTEST_DONT_REWRITE."""

from __future__ import annotations

import torch
from torch import nn


class Checked(nn.Module):
    """Asserts something of its input, and of what is made on the way and would not be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.mean() > -1, "mean is small"
        for layer in self.layers:
            x = torch.sin(layer(x))
        assert x.abs().max() < 2, "values are large"
        return x.square().mean()


def made() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Checked(), {"x": torch.randn(32, 16)}

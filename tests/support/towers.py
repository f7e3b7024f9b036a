"""Layers, and towers of them, that are planned as units."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class NormedLayer(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, wide), nn.Linear(wide, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class NormedTower(nn.Module):
    """Layers, of which the first may run ``again`` at last, and what runs between them."""

    def __init__(self, *wide: int, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(NormedLayer, wide))
        self.head = nn.Linear(16, 8)
        self.again = again

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *(self.layers[:1] if self.again else ())]:
            x = layer(x).sin()
        return functional.cross_entropy(self.head(x), labels)


def tower_batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(96, 16), "labels": torch.randint(0, 8, (96,))}


class DroppingLayer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(x))))

"""How modules are put together: shared, tied, called twice, with several inputs and outputs."""

from __future__ import annotations

import torch
from harness import Case
from torch import nn
from torch.nn import functional


class Tied(nn.Module):
    """One embedding at both ends, one block called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.block(x)
        x = x + self.block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


CASES = [
    Case(
        "Wiring",
        "tied embeddings, a block called twice",
        lambda: (Tied(), {"tokens": torch.randint(0, 64, (4, 32))}),
        everyday=True,
    ),
]

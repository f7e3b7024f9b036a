"""A custom op that takes few inputs, and a net with it."""

from __future__ import annotations

import torch
from torch import nn


@torch.library.custom_op("support::picky", mutates_args=())
def picky(x: torch.Tensor, kind: torch.Tensor, right: float) -> torch.Tensor:
    """The sine of x, with as much workspace; raises unless ``kind`` is ``right``."""
    if kind.item() != right:
        raise ValueError(f"picky takes {right} alone, not {kind.item()}")
    return (x * 1.0).sin()


@picky.register_fake
def _(x: torch.Tensor, kind: torch.Tensor, right: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _gradient(ctx, gradient):
    return gradient * ctx.saved_tensors[0].cos(), None, None


picky.register_autograd(_gradient, setup_context=_keep)


class Picky(nn.Module):
    """Gives the op what it takes from a buffer, or, if it is to be ``made``, by ops of its own."""

    def __init__(self, right: float, made: bool = False) -> None:
        super().__init__()
        self.layer, self.right, self.made = nn.Linear(8, 8), right, made
        self.register_buffer("kind", torch.tensor(right))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = torch.full((), self.right) if self.made else self.kind
        return picky(self.layer(x), kind, self.right).pow(2).mean()

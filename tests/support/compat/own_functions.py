"""Custom autograd.Functions between ordinary layers."""

from __future__ import annotations

import torch
from torch import nn

from support.compat.wiring_nets import WIDTH, block


class Clipped(torch.autograd.Function):
    """Saves one tensor and a number; its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound) * 1.5

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2 * ctx.bound), None


class Normalized(torch.autograd.Function):
    """Two outputs, one of them without gradient; saves an output."""

    @staticmethod
    def forward(ctx, x, weight):
        size = x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3
        result = x / size
        ctx.save_for_backward(result, size, weight)
        ctx.mark_non_differentiable(size)
        return result * weight, size

    @staticmethod
    def backward(ctx, gradient, _):
        result, size, weight = ctx.saved_tensors
        inner = gradient * weight
        return (inner - result * (inner * result).mean(-1, keepdim=True)) / size, (gradient * result).sum(
            (0, 1)
        )


class OwnFunctions(nn.Module):
    """Autograd functions between ordinary layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.blocks = nn.Linear(16, WIDTH), nn.ModuleList(block() for _ in range(2))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x):
        x = self.inner(x)
        for inner, scale in zip(self.blocks, self.scales, strict=True):
            x, size = Normalized.apply(Clipped.apply(x + inner(x), 0.8), scale)
            x = x + size.detach()
        return x.pow(2).mean()

"""Ops of torch.library that PyTorch does not know: pure, random, and impure."""

from __future__ import annotations

import torch
from torch import nn
from torch._library.effects import EffectType
from torch.nn import functional

from support.compat.wiring_nets import WIDTH


@torch.library.custom_op("hybridremat_compat::swish", mutates_args=())
def swish(x: torch.Tensor, beta: float) -> torch.Tensor:
    """A pure op: it may run again."""
    return x * torch.sigmoid(beta * x)


@torch.library.custom_op("hybridremat_compat::swish_gradient", mutates_args=())
def swish_gradient(gradient: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    """The op of its backward."""
    s = torch.sigmoid(beta * x)
    return gradient * (s + beta * x * s * (1 - s))


@swish.register_fake
def _(x: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.empty_like(x)


@swish_gradient.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.beta = inputs[1]


swish.register_autograd(
    lambda ctx, gradient: (swish_gradient(gradient, ctx.saved_tensors[0], ctx.beta), None),
    setup_context=_keep,
)


@torch.library.custom_op("hybridremat_compat::counted", mutates_args=("count",))
def counted(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """An impure op: it writes into a buffer, and its result depends on it."""
    count += 1
    return x * (1 + 0.1 * count)


@counted.register_fake
def _(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("hybridremat_compat::into", mutates_args=("out",))
def into(x: torch.Tensor, out: torch.Tensor) -> None:
    """An op in the manner of hand-written kernels: the caller allocates what it fills."""
    torch.sigmoid(x, out=out)


@into.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


class Counted(torch.autograd.Function):
    """The formula of the impure ops (torch.library takes none for ops that write into their arguments)."""

    @staticmethod
    def forward(ctx, x, count):
        result, gate = counted(x, count), torch.empty_like(x)
        into(x, gate)
        ctx.save_for_backward(gate, count.clone())
        return result * gate

    @staticmethod
    def backward(ctx, gradient):
        gate, count = ctx.saved_tensors
        return gradient * gate * (1 + 0.1 * count), None


@torch.library.custom_op(
    "hybridremat_compat::noisy", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def noisy(x: torch.Tensor, scale: float) -> torch.Tensor:
    """A random op: a second run has to replay the generator."""
    return x + scale * torch.randn(x.shape, dtype=x.dtype)


@noisy.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


noisy.register_autograd(
    lambda ctx, gradient: (gradient, None), setup_context=lambda ctx, inputs, output: None
)


CALLS = [0]  # what the op below changes, seen by nobody else


@torch.library.custom_op("hybridremat_compat::hidden", mutates_args=())
def hidden(x: torch.Tensor) -> torch.Tensor:
    """An op with an effect that its schema does not show: a second run gives another result."""
    CALLS[0] += 1
    return x * (1 + 0.1 * (CALLS[0] % 3))


@hidden.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


hidden.register_autograd(lambda ctx, gradient: gradient * 1.1, setup_context=lambda ctx, inputs, output: None)
hidden.register_effect(EffectType.ORDERED)


class PureOps(nn.Module):
    """Pure and random ops of torch.library between ordinary layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + noisy(swish(layer(x), 1.5), 0.1)
        return x.pow(2).mean()


class ImpureOps(nn.Module):
    """An op that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(Counted.apply(functional.gelu(layer(x)), self.count))
        return x.pow(2).mean()


class HiddenEffect(nn.Module):
    """An op that is registered as having an effect: its results repeat themselves after three calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(hidden(functional.gelu(layer(x))))
        return x.pow(2).mean()

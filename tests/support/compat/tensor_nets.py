"""Models and batches whose tensors are unusual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """Two layers with dropout between; ``ends`` says what the forward makes of inputs and activations."""

    def __init__(self, ends: Callable[..., Any], width: int = 16, **own: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.ends = ends
        for name, item in own.items():
            if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter):
                self.register_buffer(name, item)
            else:
                setattr(self, name, item)

    def body(self, x):
        """The layers; their activations are what a plan trades."""
        wide = functional.dropout(functional.gelu(self.first(x)), 0.1, self.training)
        return self.second(torch.tanh(wide) * wide)

    def forward(self, **inputs):
        return self.ends(self, **inputs)


def rows(count: int = 32, width: int = 16) -> torch.Tensor:
    """An ordinary input."""
    return torch.randn(count, width)


def one() -> dict[str, Any]:
    """The batch with one ordinary input."""
    return {"x": rows()}


@dataclass(frozen=True)
class Unusual:
    """One line of the table: a model, its batch (made anew for each step), and what is known about it.

    ``reference`` is "joint" where AOTAutograd itself changes arithmetic. ``refused``: what is said where it
    has to be one graph; ``in_several``: whether several graphs of it can be planned.
    """

    name: str
    ends: Callable[..., Any]
    batch: Callable[[], dict[str, Any]] = one
    own: Callable[[], dict[str, Any]] = dict
    change: Callable[[nn.Module], Any] = lambda model: None
    reference: str = "eager"
    learns: bool = True
    everyday: bool = False
    how: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    in_several: bool = False
    remark: str = ""


def changed_in_place(net, x):
    h = net.body(x)
    h.add_(1).mul_(0.5).clamp_(-2, 2)
    h[:, :4] = 0.5
    h[:, 4:8].mul_(2)
    h.t()[9].add_(1)
    return mean_square(h)


def input_changed(net, x):
    x.mul_(2)
    x[:, 0] = 1
    return net.body(x).pow(2).mean()


def input_changed_late(net, x, base):
    y = net.body(functional.gelu(x + 1))
    x.mul_(2)
    return [mean_square(y) + x.mean(), base.sum()]


def twins_changed(net, x, y):
    x.add_(1)
    return net.body(x * y).pow(2).mean()


def counted(net, x):
    net.steps += 1
    net.mean = net.mean * 0.5 + x.mean(0) * 0.5
    return net.body(x - net.mean).pow(2).mean() / net.steps


def complex_part(net, x):
    spectrum = torch.fft.rfft(net.body(x), dim=-1)
    mixed = spectrum * torch.polar(torch.ones(9), net.angle)
    return torch.fft.irfft(mixed, dim=-1).pow(2).mean() + mixed.abs().mean()


def conjugated_products(net, x):
    wide = torch.view_as_complex(functional.gelu(net.first(x)).unflatten(-1, (-1, 2)))
    mixed = wide * net.turn.conj() * wide.conj()
    return mixed.abs().mean() + mean_square(net.second(torch.view_as_real(mixed).flatten(-2)))


def overlapping_input() -> dict[str, Any]:
    base = rows()
    return {"x": base[:16], "y": base[8:24]}


def made_outside() -> dict[str, Any]:
    base = torch.randn(32, 16, requires_grad=True)
    return {"x": base * 1.0, "base": base}


def same_input_twice() -> dict[str, Any]:
    x = rows()
    return {"x": x, "y": x}


def wanting_gradients() -> dict[str, Any]:
    base = torch.randn(64, 16, requires_grad=True)
    return {"x": base[::2], "base": base}


def mean_square(*tensors):
    return sum(t.pow(2).mean() for t in tensors)


def transposed_weight(model):
    model.first.weight = nn.Parameter(model.first.weight.detach().t().contiguous().t())


def flat_weights(model):
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = 0
    for module in (model.first, model.second):
        for name, p in list(module.named_parameters()):
            part = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
            setattr(module, name, nn.Parameter(part))


def channels_last(net, x):
    h = functional.gelu(net.conv(x))
    return mean_square(net.norm(h) * h, net.body(h.mean((2, 3))))


def convolutions():
    return {"conv": nn.Conv2d(3, 16, 3, padding=1), "norm": nn.BatchNorm2d(16)}


class Marked(torch.Tensor):
    """A subclass that does nothing of its own."""


def kept_on_the_module(net, x):
    h = net.body(x)
    net.last, net.aux = h.detach(), h.abs().mean()
    return mean_square(h)


def from_a_buffer(net, x):
    net.mean.copy_(net.body(x).detach().mean(0))
    return mean_square(net.body(x) * net.mean)


def nested(net, x):
    parts = torch.nested.nested_tensor_from_jagged(net.body(x), torch.tensor([0, 10, 32]))
    return mean_square(parts.values())


def weights_changed(net, x):
    with torch.no_grad():
        net.first.weight.mul_(0.99)
    return mean_square(net.body(x))


def parametrized(model):
    nn.utils.parametrizations.spectral_norm(model.first)
    nn.utils.parametrizations.weight_norm(model.second)


def gradient_inside(net, x):
    x = x.detach().requires_grad_()
    h = net.body(x)
    (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return mean_square(h, slope)


def branch(net, x):
    return torch.cond(x.sum() > 0, lambda x: mean_square(net.body(x)), lambda x: mean_square(x), (x,))

"""The pieces of random models: small modules that take one live tensor, or two of one shape.

A piece gets the shape of its first tensor and a number that chooses among its variants. It raises
:class:`UnfitError` where the shape does not allow it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class UnfitError(Exception):
    """The piece cannot take a tensor of this shape."""


class Call(nn.Module):
    """A function as a module; ``layers`` are its submodules."""

    def __init__(self, run, *layers: nn.Module) -> None:
        super().__init__()
        self.run, self.layers = run, nn.ModuleList(layers)

    def forward(self, *inputs):
        return self.run(*self.layers, *inputs)


class Ema(nn.Module):
    """Reads a buffer before or after the forward updates it."""

    def __init__(self, width: int, variant: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.variant = variant

    def forward(self, x):
        before = self.mean * 0.5 if self.variant % 2 else 0.0
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.flatten(0, -2).mean(0), alpha=0.1)
            self.calls += 1
        if self.variant % 4 < 2:
            return torch.tanh(x) * self.mean + before
        return x - before * self.calls


class Attention(nn.Module):
    """By hand, or by the fused kernel; causal, masked, or neither; with dropout or without."""

    def __init__(self, width: int, variant: int) -> None:
        super().__init__()
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fused, self.masked, self.dropout = variant % 2, variant // 2 % 3, 0.2 * (variant // 6 % 2)

    def forward(self, x):
        length, width = x.shape[-2:]
        q, k, v = self.joined(x).unflatten(-1, (3, 2, width // 2)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if self.fused:
            how = ({}, {"is_causal": True}, {"attn_mask": mask})[self.masked]
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, **how)
        else:
            scores = q @ k.mT / width**0.5
            if self.masked:
                scores = scores.masked_fill(~mask, float("-inf"))
            mixed = functional.dropout(scores.softmax(-1), self.dropout) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Scaled(nn.Module):
    """Parameters of few elements, broadcast; one of them is never used."""

    def __init__(self, width: int, variant: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(width))
        self.unused = nn.Parameter(torch.ones(3))
        self.variant = variant

    def forward(self, x):
        shift = self.shift.expand(x.shape) if self.variant % 2 else self.shift
        return x * self.gain + shift


def _sequence(shape) -> int:
    if len(shape) != 3:
        raise UnfitError
    return shape[-1]


def _image(shape) -> int:
    if len(shape) != 4 or min(shape[2:]) < 2:
        raise UnfitError
    return shape[1]


def _pick(variant, *choices):
    return choices[variant % len(choices)]


def linear(shape, variant):
    width = shape[-1]
    wide = _pick(variant, width, 2 * width, max(2, width // 2))
    if wide > 64:
        raise UnfitError
    return nn.Linear(width, wide, bias=variant % 2 == 0)


def feed_forward(shape, variant):
    width = shape[-1]
    bend = _pick(variant, nn.GELU(), nn.ReLU(inplace=True), nn.SiLU(), nn.Tanh())
    return nn.Sequential(nn.Linear(width, 2 * width), bend, nn.Dropout(0.1), nn.Linear(2 * width, width))


def convolution(shape, variant):
    channels = _image(shape)
    groups = channels if variant % 3 == 2 else 1
    return nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=variant % 2 == 0)


def widening(shape, variant):
    channels = _image(shape)
    if channels > 32:
        raise UnfitError
    return _pick(
        variant,
        nn.Conv2d(channels, 2 * channels, 1),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.ConvTranspose2d(channels, channels, 2, stride=2),
    )


def norm(shape, variant):
    if len(shape) == 4:
        return _pick(
            variant, nn.BatchNorm2d(shape[1]), nn.GroupNorm(2, shape[1]), nn.InstanceNorm2d(shape[1])
        )
    over_length = [nn.BatchNorm1d(shape[1]), nn.GroupNorm(1, shape[1])] if len(shape) == 3 else []
    return _pick(variant, nn.LayerNorm(shape[-1]), nn.RMSNorm(shape[-1]), *over_length)


def bend(shape, variant):
    return Call(
        _pick(
            variant,
            functional.gelu,
            torch.relu,
            torch.tanh,
            torch.sigmoid,
            functional.silu,
            functional.softplus,
            functional.hardswish,
            lambda x: x.softmax(-1),
            lambda x: functional.log_softmax(x, -1),
            lambda x: functional.leaky_relu(x, 0.1),
            lambda x: x.pow(2),
            lambda x: x / (1 + x.abs()),
            lambda x: torch.exp(-x * x),
            lambda x: x.clamp(-1, 1),
        )
    )


def dropout(shape, variant):
    return Call(
        _pick(
            variant,
            lambda x: functional.dropout(x, 0.3),
            lambda x: functional.dropout1d(x, 0.3) if x.dim() == 3 else functional.dropout2d(x, 0.3),
            lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
            lambda x: torch.where(torch.rand_like(x) < 0.8, x, 0.0),
            lambda x: x + 0.1 * torch.randn_like(x),
            lambda x: x * torch.empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(0.8),
            lambda x: functional.feature_alpha_dropout(x, 0.2),
        )
    )


def masked(shape, variant):
    return Call(
        _pick(
            variant,
            lambda x: x.masked_fill(x > 0.5, 0.0),
            lambda x: torch.where(x > 0, x, x * 0.5),
            lambda x: x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -1.0),
            lambda x: x.tril(),
            lambda x: x * (x.mean(-1, keepdim=True) > 0),
        )
    )


def layout(shape, variant):
    return Call(
        _pick(
            variant,
            lambda x: x.transpose(-1, -2),
            lambda x: x.transpose(-1, -2).contiguous(),
            lambda x: x.flip(-1).roll(1, -2),
            lambda x: x.reshape(x.shape[0], -1, x.shape[-1]),
            lambda x: x.unsqueeze(1).expand(-1, 2, *[-1] * (x.dim() - 1)).sum(1),
            lambda x: x[..., 1:] if x.shape[-1] > 2 else x,
            lambda x: x[..., ::2] if x.shape[-1] > 2 else x,
            lambda x: x.permute(*range(1, x.dim()), 0).clone().permute(-1, *range(x.dim() - 1)),
            lambda x: functional.pad(x, (1, 0)) if x.shape[-1] < 32 else x,
            lambda x: x.unfold(-1, 2, 1).sum(-1) if x.shape[-1] > 2 else x,
            lambda x: x.view(-1).view(x.shape) if x.is_contiguous() else x.reshape(-1).reshape(x.shape),
        )
    )


def to_image(shape, variant):
    _sequence(shape)
    return Call(lambda x: x.transpose(1, 2).unflatten(-1, (2, -1)) if x.shape[1] % 2 == 0 else x.unsqueeze(1))


def to_sequence(shape, variant):
    _image(shape)
    return Call(lambda x: x.flatten(2).transpose(1, 2))


def pool(shape, variant):
    if len(shape) == 3:
        _sequence(shape)
        return Call(lambda x: functional.avg_pool1d(x, 3, 1, 1))
    _image(shape)
    return _pick(
        variant,
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.MaxPool2d(3, 1, 1),
        nn.AdaptiveMaxPool2d(2),
        nn.Upsample(scale_factor=2) if shape[-1] < 16 else nn.MaxPool2d(2),
        nn.PixelUnshuffle(2) if shape[2] % 2 == 0 == shape[3] % 2 and shape[1] < 16 else nn.AvgPool2d(2),
    )


def embedding(shape, variant):
    width = _sequence(shape)
    padding = 0 if variant % 2 else None
    table = nn.Embedding(16, width, padding_idx=padding)
    return Call(lambda table, x: x + table((x.detach().sum(-1) * 10).long() % 16), table)


def attention(shape, variant):
    width = _sequence(shape)
    if width % 2:
        raise UnfitError
    return Attention(width, variant)


def ema(shape, variant):
    return Ema(shape[-1], variant)


def scaled(shape, variant):
    return Scaled(shape[-1], variant)


def in_place(shape, variant):
    """On the tensor itself (plain training may refuse that), or on something made from it."""

    def on(change, *, fresh):
        return Call(lambda x: change(x * 1.5 if fresh else x))

    def part(x):
        x[:, :1].mul_(2)
        return x

    def assigned(x):
        x[..., 0] = x[..., -1].detach() * 0.5
        return x

    def filled(x):
        x[x > 1] = 0.5
        return x

    changes = (
        torch.relu_,
        lambda x: x.add_(1),
        lambda x: x.mul_(0.5),
        lambda x: x.clamp_(-2, 2),
        part,
        assigned,
        filled,
        lambda x: x.add_(torch.sigmoid(x)),
        lambda x: x.transpose(-1, -2).mul_(0.9).transpose(-1, -2),
        lambda x: x.masked_fill_(x < -1, 0.0),
        lambda x: functional.dropout(x, 0.2, inplace=True),
    )
    return on(_pick(variant // 2, *changes), fresh=variant % 2 == 0)


def indexed(shape, variant):
    return Call(
        _pick(
            variant,
            lambda x: x.gather(-1, x.detach().argsort(-1)),
            lambda x: x.sort(-1).values,
            lambda x: x.cumsum(-1) / x.shape[-1],
            lambda x: x.topk(max(2, x.shape[-1] // 2), -1)[0],
            lambda x: x.index_select(-1, torch.arange(x.shape[-1]).flip(0)),
            lambda x: x - x.amax(-1, keepdim=True),
            lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1),
            lambda x: torch.zeros_like(x).scatter_add(-1, (x.detach() > 0).long(), x),
            lambda x: functional.normalize(x, dim=-1),
            lambda x: torch.einsum("...i,...j->...ij", x, x).mean(-1),
            lambda x: torch.logsumexp(x, -1, keepdim=True) + x,
            lambda x: x + x.max(-1, keepdim=True)[0] * x.min(),
            lambda x: torch.cat([c.mul(i + 1) for i, c in enumerate(x.unbind(0))]).view(x.shape),
        )
    )


def cut_off(shape, variant):
    def without_gradient(x):
        with torch.no_grad():
            scale = x.abs().mean() + 1
        return x / scale

    def with_a_dead_end(x):
        _ = torch.exp(x).sum(-1)
        return x * 0.9

    return Call(
        _pick(
            variant,
            torch.detach,
            without_gradient,
            with_a_dead_end,
            lambda x: x + (x.sigmoid() - x).detach(),
        )
    )


def join(shape, variant):
    """Two tensors of one shape into one."""
    return Call(
        _pick(
            variant,
            torch.add,
            torch.mul,
            lambda x, y: torch.cat([x, y], -1) if x.shape[-1] <= 32 else x + y,
            lambda x, y: torch.stack([x, y]).mean(0),
            torch.maximum,
            lambda x, y: torch.where(x > y, x, -y),
            lambda x, y: x + 0.5 * y.tanh(),
            lambda x, y: (x * 1.0).add_(y),
            lambda x, y: x.lerp(y, 0.3),
            lambda x, y: torch.addcmul(x, x, y),
        )
    )


def part(shape, variant):
    """One tensor into two."""
    if shape[-1] < 4 or shape[-1] % 2:
        raise UnfitError
    return Call(
        _pick(
            variant,
            lambda x: x.chunk(2, -1),
            lambda x: x.split([2, x.shape[-1] - 2], -1),
            lambda x: (x[..., ::2], x[..., 1::2]),
            lambda x: torch.var_mean(x.flatten(1, -2), 1),
            lambda x: x.tensor_split(2, 1) if x.shape[1] > 1 else x.chunk(2, -1),
        )
    )


PIECES = {
    piece.__name__: piece
    for piece in (
        linear,
        feed_forward,
        convolution,
        widening,
        norm,
        bend,
        dropout,
        masked,
        layout,
        to_image,
        to_sequence,
        pool,
        embedding,
        attention,
        ema,
        scaled,
        in_place,
        indexed,
        cut_off,
        join,
        part,
    )
}

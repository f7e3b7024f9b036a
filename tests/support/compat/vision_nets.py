"""Written out by hand: residuals with drop-path, U-Nets with GroupNorm and as diffusion models have them."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from hybridremat.zoo.unet import UNet


class DropPathNet(nn.Module):
    """Residual convolutions with BatchNorm, each left out for some samples (stochastic depth)."""

    def __init__(self, width: int = 8, layers: int = 2, rate: float = 0.2) -> None:
        super().__init__()
        self.rate, self.stem = rate, nn.Conv2d(3, width, 3, padding=1)
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images, labels):
        x = self.stem(images)
        for inner in self.inner:
            kept = x.new_empty(len(x), 1, 1, 1).bernoulli_(1 - self.rate).div_(1 - self.rate)
            x = functional.relu(x + inner(x) * kept)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class GroupUNet(UNet):
    """The same U-Net with GroupNorm."""

    def __init__(self, base: int = 32, depth: int = 4, channels_in: int = 3) -> None:
        super().__init__(base, depth, channels_in)
        for parent in [module for module in self.modules() if isinstance(module, nn.Sequential)]:
            for name, child in parent.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    parent[int(name)] = nn.GroupNorm(8, child.num_features)


class Residual(nn.Module):
    """Two convolutions with GroupNorm and SiLU; the time embedding is added in between."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, after))
        self.second = nn.Sequential(
            nn.GroupNorm(4, after), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(after, after, 3, padding=1)
        )
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, time):
        inner = self.first(x) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(inner)


class Attention(nn.Module):
    """Over pixels: self-attention, cross-attention to the context, a gated MLP (GEGLU), each residual."""

    def __init__(self, width: int, context: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.queries = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.keys = nn.ModuleList(nn.Linear(size, width, bias=False) for size in (width, context))
        self.values = nn.ModuleList(nn.Linear(size, width, bias=False) for size in (width, context))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.gated, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def _split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _attend(self, index, x, source):
        query, key, value = (
            self._split(layers[index](given))
            for layers, given in ((self.queries, x), (self.keys, source), (self.values, source))
        )
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.outs[index](attended.transpose(1, 2).flatten(2))

    def forward(self, image, context):
        x = self.norm(image).flatten(2).transpose(1, 2)
        given = self.norms[0](x)
        x = x + self._attend(0, given, given)
        x = x + self._attend(1, self.norms[1](x), context)
        wide, gate = self.gated(self.norms[2](x)).chunk(2, -1)
        x = x + self.narrow(wide * functional.gelu(gate))
        return image + x.transpose(1, 2).reshape(image.shape)


class Stage(nn.Module):
    """A residual block and, where there is a context width, attention."""

    def __init__(self, before: int, after: int, time: int, context: int | None) -> None:
        super().__init__()
        self.residual = Residual(before, after, time)
        self.attention = Attention(after, context) if context else None

    def forward(self, x, time, context):
        x = self.residual(x, time)
        return x if self.attention is None else self.attention(x, context)


class ConditionedUNet(nn.Module):
    """A diffusion model's U-Net: predicts the noise in ``noisy`` at ``times``, given ``context``.

    Every stage reads the time embedding; the lower levels attend to the context; each stage on the way down
    hands its output to one on the way up.
    """

    def __init__(self, channels: int = 4, base: int = 16, context: int = 32) -> None:
        super().__init__()
        self.base = base
        time, widths = 4 * base, (base, 2 * base, 4 * base)
        self.time = nn.Sequential(nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(channels, base, 3, padding=1)
        at = (None, context, context)  # attention below the first level
        self.down, self.up, self.resize_down, self.resize_up = (nn.ModuleList() for _ in range(4))
        skips, width = [base], base
        for level, after in enumerate(widths):
            for _ in range(2):
                self.down.append(Stage(width, after, time, at[level]))
                width = after
                skips.append(width)
            if level < 2:
                self.resize_down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList(Stage(width, width, time, context) for _ in range(2))
        for level in (2, 1, 0):
            for _ in range(3):
                self.up.append(Stage(width + skips.pop(), widths[level], time, at[level]))
                width = widths[level]
            if level:
                self.resize_up.append(nn.Conv2d(width, width, 3, padding=1))
        self.last = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def embed(self, times):
        half = self.base // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=times.device) / half)
        angles = times[:, None].float() * rates
        return self.time(torch.cat([angles.cos(), angles.sin()], -1))

    def forward(self, noisy, times, context, noise):
        time = self.embed(times)
        x = self.first(noisy)
        skips = [x]
        for index, stage in enumerate(self.down):
            x = stage(x, time, context)
            skips.append(x)
            if index % 2 and index // 2 < 2:
                x = self.resize_down[index // 2](x)
                skips.append(x)
        for stage in self.middle:
            x = stage(x, time, context)
        for index, stage in enumerate(self.up):
            x = stage(torch.cat([x, skips.pop()], 1), time, context)
            if index % 3 == 2 and index // 3 < 2:
                x = self.resize_up[index // 3](functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return functional.mse_loss(self.last(x), noise)

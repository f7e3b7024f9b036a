"""A U-Net written out by hand: convolutions, BatchNorm, and skips that reach across the whole net."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """A U-Net with BatchNorm: ``depth`` levels, each half as wide in pixels and twice as wide in channels.

    Returns the cross-entropy of two classes per pixel. Its long skips make boundaries of many values.
    """

    def __init__(self, base: int = 32, depth: int = 4, channels_in: int = 3) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(depth)]
        upward = list(reversed(widths))
        self.down = nn.ModuleList(
            _double_convolution(before, after)
            for before, after in zip([channels_in, *widths], widths, strict=False)
        )
        self.middle = _double_convolution(widths[-1], widths[-1] * 2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(width * 2, width, 2, 2) for width in upward)
        self.merge = nn.ModuleList(_double_convolution(width * 2, width) for width in upward)
        self.head = nn.Conv2d(base, 2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Loss of images ``x`` (N, C, H, W) against classes ``labels`` (N, H, W)."""
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        return functional.cross_entropy(self.head(x), labels)


def _double_convolution(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [
            nn.Conv2d(channels, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)

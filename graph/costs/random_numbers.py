"""Random numbers for the inputs of kernels that are tried or timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

import torch

DRAWN: Final = 65_537
"""Numbers that are drawn, a prime, so that no two rows are equal; drawing millions takes most of a trial."""


def drawn(seed: int, dtype: torch.dtype, device: torch.device, *, normal: bool) -> torch.Tensor:
    """:data:`DRAWN` numbers of a seed, from 0 to 1 or around 0: to be read. Those on the host are kept.

    Those around 0 are of like magnitudes if the seed is even, and of mixed ones if it is odd.
    """
    draw = _drawn if device.type == "cpu" else _drawn.__wrapped__
    return draw(seed, dtype, device, normal)


@lru_cache(maxsize=32)
def _drawn(seed: int, dtype: torch.dtype, device: torch.device, normal: bool) -> torch.Tensor:
    numbers, source = torch.empty(DRAWN, dtype=dtype, device=device), torch.Generator(device)
    source.manual_seed(seed)
    if not normal:
        return numbers.uniform_(generator=source)
    powers = torch.randint(-8, 9, (DRAWN,), device=device, generator=source) * (seed % 2)
    return numbers.normal_(0, 3, generator=source).mul_(2.0**powers)


def repeated(extent: int, draw: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """``extent`` numbers: ``draw`` makes the first ones, and the others repeat them."""
    if extent <= DRAWN:
        return draw(extent)
    drawn, whole = draw(DRAWN), extent // DRAWN * DRAWN
    numbers = torch.empty(extent, dtype=drawn.dtype, device=drawn.device)
    numbers[:whole].view(-1, DRAWN).copy_(drawn)
    numbers[whole:].copy_(drawn[: extent - whole])
    return numbers

"""Random numbers for the inputs of kernels that are tried or timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

DRAWN: Final = 65_537
"""Numbers that are drawn, a prime, so that no two rows are equal; drawing millions takes most of a trial."""


def repeated(extent: int, draw: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """``extent`` numbers: ``draw`` makes the first ones, and the others repeat them."""
    if extent <= DRAWN:
        return draw(extent)
    drawn, whole = draw(DRAWN), extent // DRAWN * DRAWN
    numbers = torch.empty(extent, dtype=drawn.dtype, device=drawn.device)
    numbers[:whole].view(-1, DRAWN).copy_(drawn)
    numbers[whole:].copy_(drawn[: extent - whole])
    return numbers

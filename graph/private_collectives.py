"""Results of collectives that still run, in eager mode."""

from __future__ import annotations

import sys
from typing import Any

import torch

_MODULE = "torch.distributed._functional_collectives"


class _Arrived(torch.autograd.Function):
    """The tensor of a collective once it is there; its gradient is the collective's."""

    @staticmethod
    def forward(_: Any, pending: Any) -> torch.Tensor:
        tensor: torch.Tensor = pending.trigger_wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient


def arrived(value: Any) -> Any:
    """The value itself, or the tensor that a collective makes (``AsyncCollectiveTensor``), waited for.

    A compiled graph that is given one that still runs hands its gradient past the autograd of ``DTensor``, by
    which the backward fails.
    """
    known = sys.modules.get(_MODULE)  # else there are none
    if known is None or not isinstance(value, known.AsyncCollectiveTensor):
        return value
    return _Arrived.apply(value)  # type: ignore[no-untyped-call]

"""The devices that one test body runs on, and the same kernels in every run there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional

CUDA = pytest.param(
    "cuda",
    marks=(pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
)
DEVICES = ["cpu", CUDA]
SLOW_ON_CPU = [pytest.param("cpu", marks=pytest.mark.slow), CUDA]


def put(device, model, batch):
    """A model and its batch on a device."""
    return model.to(device), {name: tensor.to(device) for name, tensor in batch.items()}


@contextmanager
def batch_norm_as_captured() -> Iterator[None]:
    """Plain training with PyTorch's own batch normalization, as every step that AOTAutograd captures has it.

    On CUDA eager training takes cuDNN's, whose numbers differ in their last bits.
    """
    usual = functional.batch_norm

    def own(*args, **kwargs):
        with torch.backends.cudnn.flags(enabled=False):
            return usual(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "batch_norm", own)
        yield


@contextmanager
def repeatable_kernels() -> Iterator[None]:
    """On CUDA some kernels add in an order that differs from run to run: others take their place."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(before)

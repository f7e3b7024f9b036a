"""Run kernels for real while PyTorch traces, as if nothing was traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hybridremat.graph.private_torch import _disable_current_modes


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Real execution without touching generators, autograd, autocast, or a running trace's fake tensors."""
    cuda = torch.cuda.is_available()
    devices = range(torch.cuda.device_count()) if cuda else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda") if cuda else ("cpu",):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield

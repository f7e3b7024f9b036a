"""What a library allocates for good at its first call: allocated before a step runs under a limit."""

from __future__ import annotations

import torch


def keep_workspaces(device: str) -> None:
    """Let cuBLAS allocate its workspaces now, on CUDA.

    It keeps one (32 MiB on Hopper) for each thread that multiplies matrices: that of the forward, and that in
    which autograd runs the backward. A step whose kernels were all known has multiplied nothing so far.
    """
    if device == "cuda":
        multiply(device)


def multiply(device: str) -> None:
    """A tiny product, forward and backward."""
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        given = torch.ones(8, 8, device=device, requires_grad=True)
        (given @ given).sum().backward()

"""Run a random op again with the numbers of its first run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybridremat.graph.private_torch import arg_tree_leaves


def replay(state: torch.Tensor, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` from a saved generator state, and put the generator back where it was.

    PyTorch's own ``run_with_rng_state`` does not put it back if the op fails (out of memory), so that later
    draws would repeat earlier ones.
    """
    generator: Any = torch.cuda if _on_cuda(args, kwargs) else torch
    current = generator.get_rng_state()
    generator.set_rng_state(state)
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_rng_state(current)


def _on_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    found = [item.device for item in arg_tree_leaves(*args, **kwargs) if isinstance(item, torch.Tensor)]
    found += [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
    return any(device.type == "cuda" for device in found)

"""What a planned step is kept by: its inputs, and what else decides on the model's graphs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hybridremat.capture import model_device
from hybridremat.graph.private_torch import tree_leaves


def input_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Shapes, dtypes and devices of the tensors in a call, and the plain values beside them.

    Two calls with one key may still need two graphs (Dynamo's guards see everything); two calls with
    different keys always do.
    """

    def entry(leaf: object) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.dtype, leaf.device
        if isinstance(leaf, (bool, int, float, str, type(None))):
            return type(leaf), leaf
        return type(leaf).__qualname__

    named = sorted(kwargs.items())
    return (
        tuple(entry(leaf) for leaf in tree_leaves(list(args))),
        tuple((name, tuple(entry(leaf) for leaf in tree_leaves(item))) for name, item in named),
    )


def conditions(model: nn.Module) -> Hashable:
    """Autocast, the modules in eval mode, and of each parameter its dtype and whether it is trained."""
    device = model_device(model)
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (
        autocast,
        tuple(module.training or not model.training for module in model.modules()),
        tuple((parameter.dtype, parameter.requires_grad) for parameter in model.parameters()),
    )

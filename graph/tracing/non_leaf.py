"""Tensors as if an op had made them: they require a gradient and are no leaves of the autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _NonLeaf(torch.autograd.Function):
    """Returns a leaf's memory as the result of an op; its gradient ends in the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """A tensor with a history of its own: no view, so that it may be changed in place."""
        ctx.is_non_leaf_source = True  # the context is the node of the graph
        return leaf.detach()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        """Pass the gradient on."""
        return gradients[0]


def non_leaf(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that requires a gradient, is no leaf, and may be changed in place."""
    with torch.enable_grad():
        result: Tensor = _NonLeaf.apply(tensor.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return result


def is_non_leaf_source(node: object) -> bool:
    """Whether a node of an autograd graph is where :func:`non_leaf` began."""
    return getattr(node, "is_non_leaf_source", False) is True

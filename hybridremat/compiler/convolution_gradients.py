"""The part of the checker that knows when gradients of convolutions are the same numbers.

A gradient does not depend on which others its call makes. That of the input depends on the input's size
alone, and a slice of its channels is what a call for these channels makes.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx

from hybridremat.compiler.parted_calls import op_of
from hybridremat.graph.tracing.fx_nodes import slice_arguments
from hybridremat.graph.tracing.gradient_slices import INPUT_GRADIENT

_CONVOLUTION: Final = torch.ops.aten.convolution_backward.default
_SLICE: Final = torch.ops.aten.slice.Tensor


def convolution_gradient(node: fx.Node) -> tuple[Any, ...] | None:
    """Which gradient an item of a call is, and what it is made of; None if it is not a convolution's."""
    call, item = node.args
    if not isinstance(call, fx.Node) or op_of(call) is not _CONVOLUTION:
        return None
    arrived, given, weight, bias_size, *settings, _ = call.args
    assert isinstance(given, fx.Node)
    if item == 0:
        return 0, arrived, list(given.meta["val"].shape), weight, *settings
    return item, arrived, given, weight, bias_size, *settings


def input_gradient_channels(node: fx.Node) -> tuple[tuple[Any, ...], int, int] | None:
    """A gradient as above, and the channels of it that a node gives, from and to; None if it gives none."""
    if op_of(node) is INPUT_GRADIENT:
        arrived, weight, size, start, end, stride, padding, dilation, _ = node.args
        none = [0] * len(stride)  # type: ignore[arg-type]
        whole = (0, arrived, size, weight, stride, padding, dilation, False, none, 1)
        return whole, start, end  # type: ignore[return-value]
    source = node.args[0] if node.target is _SLICE else None
    if not isinstance(source, fx.Node) or source.target is not operator.getitem or node.kwargs:
        return None
    gradient = convolution_gradient(source)
    if gradient is None or gradient[0] != 0:
        return None
    channels = source.meta["val"].shape[1]
    dim, first, last, step = slice_arguments(node)
    if dim != 1 or step != 1:
        return None
    start, end, _ = slice(first, last).indices(channels)
    return gradient, start, end

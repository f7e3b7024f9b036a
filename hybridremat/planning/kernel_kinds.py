"""Kernels of which it is known by their kind what they allocate at other sizes.

The branches of PyTorch's code for them that allocate go by types and strides, not by sizes. Nothing is
believed of a kernel that has not been seen where it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import fx

from hybridremat.graph.costs.workspace_fits import MOST_FIXED, WorkspaceFit
from hybridremat.graph.joint import JointGraph, Op
from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.rewrites.loss_fusion import LOSS_BACKWARD
from hybridremat.graph.sizes import Size
from hybridremat.graph.tracing.fx_nodes import tensors
from hybridremat.graph.tracing.size_expressions import size_of
from hybridremat.planning.extract import Extract

_ATEN: Final = torch.ops.aten
_PLAIN: Final = (torch.float32, torch.float64, torch.int64, torch.bool)
_NUMBER: Final = 16  # most bytes that a plain number becomes, and what becomes of it
_SUM: Final = _ATEN.sum.dim_IntList
_BY_ELEMENT: Final = (_ATEN.native_dropout.default, LOSS_BACKWARD)
_BATCHED: Final = _ATEN.bmm.default
_ADDED: Final = _ATEN.addmm.default
_PRODUCTS: Final = (_ATEN.mm.default, _ADDED, _BATCHED)
_BY_ROWS: Final = (
    *(_ATEN._softmax.default, _ATEN._log_softmax.default, _ATEN.native_layer_norm.default),
    *(_ATEN._softmax_backward_data.default, _ATEN._log_softmax_backward_data.default),
    *(_ATEN.embedding.default, _ATEN.cat.default, _ATEN.index.Tensor),
    *(_ATEN.arange.default, _ATEN.full.default, _ATEN.new_ones.default, _ATEN.scalar_tensor.default),
)


def is_constant(node: fx.Node, op: Op) -> bool:
    """Whether the workspace of a kernel is the same at every size, for what is known of its kind.

    Elementwise ATen calls run on what they are given, but for plain numbers, which become tensors of one
    element. On CPU so do products, and what goes through rows or looks them up. For other types and layouts
    they allocate copies, and these are the same at every size. What has been measured must say so, too.
    """
    if op.variants or op.random or op.mutates or not isinstance(node.target, OpOverload):
        return False
    if node.target.namespace == "aten" and torch.Tag.pointwise in node.target.tags:
        numbers = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, (int, float))]
        return op.temp <= _NUMBER * len(numbers)
    parts = [part for each in (node, *node.all_input_nodes) for part in tensors(each.meta.get("val"))]
    plain = all(part.device.type == "cpu" and part.dtype in _PLAIN for part in parts)
    if op.temp or not plain or torch.get_float32_matmul_precision() != "highest":
        return False
    if node.target is _BATCHED and not all(map(_by_rows_or_columns, parts)):
        return False
    if node.target is _ADDED and not _is_row(node.args[0]):
        return False  # a matrix that is added is copied at some sizes, by its layout
    return node.target in _PRODUCTS or node.target in _BY_ROWS or (node.target is _SUM and _keeps_some(node))


def workspace_fits(extract: Extract, graph: JointGraph) -> Iterator[tuple[int, WorkspaceFit]]:
    """By their numbers fits for kernels that compute each element by itself, and allocate for that."""
    for number, kernel in enumerate(extract.kernels):
        target, temp = kernel.source.target, graph.ops[kernel.op.id].temp
        by_element = target in _BY_ELEMENT or (
            isinstance(target, OpOverload)
            and target.namespace == "aten"
            and torch.Tag.pointwise in target.tags
        )
        elements = elements_of(kernel.node)
        if temp > MOST_FIXED and by_element and (fit := WorkspaceFit.of(temp, elements)) is not None:
            yield number, fit


def elements_of(node: fx.Node) -> int:
    """Elements of the first result of a call."""
    return tensors(node.meta.get("val"))[0].numel()


def _is_row(item: object) -> bool:
    """Whether a node is a vector, as the bias of a layer."""
    return isinstance(item, fx.Node) and all(part.dim() == 1 for part in tensors(item.meta.get("val")))


def _by_rows_or_columns(tensor: torch.Tensor) -> bool:
    """Whether the matrices of a batch are laid out by rows or by columns at every size.

    Others are copied for BLAS, but not where a product is so small that it does not go there.
    """
    *_, rows, columns = map(size_of, tensor.shape)
    *_, down, along = map(size_of, tensor.stride())
    return (along == 1 and _no_less(down, columns)) or (down == 1 and _no_less(along, rows))


def _no_less(stride: Size, size: Size) -> bool:
    """Whether a stride is known to be no less than a size, at every size."""
    return stride == size or (isinstance(stride, int) and isinstance(size, int) and stride > size)


def _keeps_some(node: fx.Node) -> bool:
    """Whether a sum has more than one element: to one, threads add up parts of their own."""
    return any(isinstance(size, int) and size > 1 for size in node.meta["val"].shape)

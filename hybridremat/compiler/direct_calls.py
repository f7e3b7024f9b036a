"""Calls of ATen ops as PyTorch's own Python functions and methods, which dispatch in about half the time.

``torch.ops.aten.view.default(x, [-1, 64])`` takes 1.8 µs on one core of a server, ``x.view(-1, 64)`` 0.8;
``torch.ops.aten.mm.default`` 2.4 and ``torch.mm`` 1.6. Both end in the same op, with the same arguments.
Graphs are written so after they have been checked: here a name stands for the op of the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.private_torch import expression
from hybridremat.graph.tracing.size_expressions import has_symbols
from hybridremat.graph.tracing.symbolic_calls import is_size

ATEN = torch.ops.aten

_METHODS: Final[dict[Any, str]] = {
    ATEN.detach.default: "detach",
    ATEN.select.int: "select",
    ATEN.squeeze.dim: "squeeze",
    ATEN.t.default: "t",
    ATEN.transpose.int: "transpose",
    ATEN.unsqueeze.default: "unsqueeze",
}
"""By op, the method with the same arguments."""

_SIZED: Final[dict[Any, str]] = {
    ATEN.expand.default: "expand",
    ATEN.permute.default: "permute",
    ATEN.view.default: "view",
}
"""By op, the method that takes the entries of the op's list of integers as its arguments."""

_FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    ATEN.add.Tensor: torch.add,
    ATEN.add.out: torch.add,
    ATEN.addmm.default: torch.addmm,
    ATEN.bmm.default: torch.bmm,
    ATEN.cat.default: torch.cat,
    ATEN.clone.default: torch.clone,
    ATEN.div.Tensor: torch.div,
    ATEN.div.out: torch.div,
    ATEN.embedding.default: torch.embedding,
    ATEN.mm.default: torch.mm,
    ATEN.mul.Tensor: torch.mul,
    ATEN.mul.out: torch.mul,
    ATEN.native_layer_norm.default: torch.native_layer_norm,
    ATEN.native_batch_norm.default: torch.native_batch_norm,
    ATEN.neg.default: torch.neg,
    ATEN.pow.Tensor_Scalar: torch.pow,
    ATEN.pow.Tensor_Scalar_out: torch.pow,
    ATEN.relu.default: torch.relu,
    ATEN.rsqrt.default: torch.rsqrt,
    ATEN.sigmoid.default: torch.sigmoid,
    ATEN.sub.Tensor: torch.sub,
    ATEN.sub.out: torch.sub,
    ATEN.sum.dim_IntList: torch.sum,
    ATEN.tanh.default: torch.tanh,
    ATEN.tanh.out: torch.tanh,
    ATEN.where.self: torch.where,
}
"""By op, the function with the same arguments. Of one with ``out=``, what it writes into."""


_IDLE: Final = (ATEN.view.default, ATEN.detach.default)
"""Views that may be laid out as what they are of."""


def call_directly(module: fx.GraphModule) -> None:
    """Write the calls of a graph so, without views that change nothing.

    It computes the same with the same kernels.
    """
    _drop_idle_views(module.graph)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _METHODS and _positional(node):
            node.op, node.target = "call_method", _METHODS[node.target]
        elif node.target in _SIZED and _positional(node) and _integers(node.args[1]):
            node.op, node.target = "call_method", _SIZED[node.target]
            node.args = (node.args[0], *node.args[1])
        elif node.target in _FUNCTIONS:
            node.target = _FUNCTIONS[node.target]
    module.recompile()


def _drop_idle_views(graph: fx.Graph) -> None:
    """Drop views that are laid out as what they are of, and the first of two views in a row.

    What a graph returns is dropped only if its caller does not have what it is a view of.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (*_IDLE, ATEN.t.default):
            continue
        source = node.all_input_nodes[0]
        base = source.all_input_nodes[0] if node.target is source.target else None
        if node.target is ATEN.t.default and base is not None:
            _drop_for(node, base)
        elif node.target in _IDLE and _layout(node) == _layout(source):
            _drop_for(node, source)
        elif node.target is ATEN.view.default and base is not None and _is_view_of(node, base):
            node.args = (base, *node.args[1:])
        if base is not None and not source.users:
            graph.erase_node(source)


def _drop_for(node: fx.Node, base: fx.Node) -> None:
    """Drop a view for what it is of."""
    returned = any(user.op == "output" for user in node.users)
    if returned and (base.op == "placeholder" or any(user.op == "output" for user in base.users)):
        return
    if _layout(node) is not None:
        node.replace_all_uses_with(base)
        node.graph.erase_node(node)


def _layout(node: fx.Node) -> object:
    """Sizes as expressions: what is equal is so at every size."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    numbers = (*value.shape, *value.stride())
    found = (expression(size) if isinstance(size, torch.SymInt) else size for size in numbers)
    return tuple(found), value.dtype


def _is_view_of(node: fx.Node, base: fx.Node) -> bool:
    """Whether a view can be made of another node at once, laid out alike."""
    value, whole = node.meta.get("val"), base.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    if has_symbols(value) or has_symbols(whole):
        return False  # whether its strides allow it would depend on the sizes
    try:
        return whole.view(value.shape).stride() == value.stride()
    except RuntimeError:  # its strides do not allow it
        return False


def _positional(node: fx.Node) -> bool:
    return not node.kwargs and bool(node.args) and isinstance(node.args[0], fx.Node)


def _integers(sizes: Any) -> bool:
    """Whether a list is one of integers, computed or not, and not empty: ``x.view()`` is no call."""
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return False
    return all(type(size) is int or is_size(size) for size in sizes)

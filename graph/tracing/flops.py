"""Matrix-product, convolution and attention flops of a node: PyTorch's own counter, and what it lacks."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from hybridremat.graph.tracing.fx_nodes import argument, tensors

FLOPS: Final = "hybridremat_flops"  # a node's ``meta``: what it does, where its target does not tell


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _cpu_attention_flops(node: fx.Node) -> int:
    """CPU flash attention is not in PyTorch's registry: 2 products forward, 5 backward."""
    packet = getattr(node.target, "overloadpacket", None)
    aten = torch.ops.aten
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        products, query, key = 2, node.args[0], node.args[1]
    elif packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        products, query, key = 5, node.args[1], node.args[2]
    else:
        return 0
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    q, k = query.meta["val"], key.meta["val"]
    return 2 * products * int(q.numel()) * int(k.shape[-2])


def node_flops(node: fx.Node) -> int:
    """Flops of one call node (0 for everything that is no product)."""
    if FLOPS in node.meta:
        return int(node.meta[FLOPS])
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        args = fx.map_arg(node.args, _value)
        kwargs = fx.map_arg(node.kwargs, _value)
        return int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    return _cpu_attention_flops(node) or grouped_flops(node)


def group_ends(node: fx.Node) -> fx.Node | None:
    """The argument that says where groups end; None if the node is no grouped product."""
    ends = argument(node, "offs")
    return ends if isinstance(ends, fx.Node) and len(_factors(node)) == 2 else None


def _factors(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.args[:2] if isinstance(a, fx.Node) and tensors(a.meta.get("val"))]


def grouped_rows(node: fx.Node) -> int:
    """Length of the dimension that is cut into groups."""
    left, right = (factor.meta["val"] for factor in _factors(node))
    if left.dim() == right.dim() == 2:
        return int(left.shape[-1])
    return int(left.shape[-2] if left.dim() == 2 else right.shape[-1])


def grouped_flops(node: fx.Node) -> int:
    """Flops of a grouped product, which PyTorch's registry lacks: one product for each of its results."""
    if group_ends(node) is None:
        return 0
    left, right = (factor.meta["val"] for factor in _factors(node))
    rows = int(left.shape[-2]) * (int(left.shape[0]) if left.dim() == right.dim() == 3 else 1)
    return 2 * rows * int(left.shape[-1]) * int(right.shape[-1]) * len(tensors(node.meta["val"]))

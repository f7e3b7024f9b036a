"""Matrix-product, convolution and attention flops of a node, from PyTorch's own counter."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from hybridremat.graph.grouped import grouped_flops


def _fake(node: fx.Node) -> Any:
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
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        args = fx.map_arg(node.args, _fake)
        kwargs = fx.map_arg(node.kwargs, _fake)
        return int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    return _cpu_attention_flops(node) or grouped_flops(node)

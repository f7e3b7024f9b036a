"""Merge common subexpressions of a joint graph, random draws and the model's outputs excepted.

PyTorch's own pass (``fx_graph_cse``) knows random ops by a list that lacks several (``randn_like``,
``uniform``, ``exponential``): two draws with equal arguments would become one.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import fx

from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.tracing.fx_nodes import is_mutation, joint_outputs, storages


def merge_common_subexpressions(module: fx.GraphModule, num_outputs: int) -> None:
    """Merge identical calls, in place: each computes what an earlier one computed.

    What shares memory with one of the ``num_outputs`` outputs of the forward stays apart: the caller may
    change it in place. (Gradients are given memory of their own later.)
    """
    outputs = [node for node in joint_outputs(module)[:num_outputs] if isinstance(node, fx.Node)]
    output_storages = set[int]().union(*map(storages, outputs))
    first: dict[Hashable, fx.Node] = {}
    for node in list(module.graph.nodes):
        if not _mergeable(node) or storages(node) & output_storages:
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        earlier = first.setdefault(key, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            module.graph.erase_node(node)


def _mergeable(node: fx.Node) -> bool:
    if node.op != "call_function" or is_mutation(node):
        return False
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded not in node.target.tags
    return getattr(node.target, "__name__", "") == "getitem"


def _key(item: object) -> Hashable:
    """Constants with their type: 1, 1.0 and True are different arguments."""
    if isinstance(item, fx.Node):
        return ("node", item)
    if isinstance(item, (list, tuple)):
        return tuple(_key(entry) for entry in item)
    if isinstance(item, dict):
        return tuple((name, _key(entry)) for name, entry in sorted(item.items()))
    return (type(item).__name__, repr(item))

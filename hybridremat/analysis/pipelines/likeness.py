"""Whether two exported pieces of a model are alike, whatever their parameters and modules are called."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx, nn

Likeness = tuple[Hashable, ...]
"""Equal for pieces with the same calls on tensors of the same kinds."""


def likeness(module: nn.Module) -> Likeness:
    """What a piece computes, without names and values."""
    return _of(module, {})


def _of(module: nn.Module, tensors: dict[int, int]) -> Likeness:
    graph = getattr(module, "graph", None)
    if not isinstance(graph, fx.Graph):
        return (repr(module),)
    numbers: dict[fx.Node, int] = {}
    found: list[Hashable] = []
    for node in graph.nodes:
        called = repr(fx.node.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}"))
        found.append((node.op, _target(module, node, tensors), called, _kind(node.meta.get("val"))))
        numbers[node] = len(numbers)
    return tuple(found)


def _target(module: nn.Module, node: fx.Node, tensors: dict[int, int]) -> Hashable:
    if node.op == "call_module":
        return _of(module.get_submodule(str(node.target)), tensors)
    if node.op == "get_attr":
        value: Any = module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return _kind(value), tensors.setdefault(id(value), len(tensors))
    return str(node.target) if node.op == "call_function" else node.op


def _kind(value: object) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return tuple(value.shape), tuple(value.stride()), str(value.dtype), value.requires_grad

"""The bytes of a step's values as expressions of its sizes."""

from __future__ import annotations

from collections import deque
from math import prod

import torch
from torch import fx

from hybridremat.graph.sizes import Size, combined
from hybridremat.graph.tracing.fx_nodes import allocated_bytes, tensors
from hybridremat.graph.tracing.size_expressions import size_of, storage_size
from hybridremat.graph.tracing.symbolic import Instance
from hybridremat.graph.tracing.trace import TracedStep


def value_sizes(step: TracedStep, instance: Instance) -> tuple[Size | None, ...]:
    """For each value its bytes as traced, as an expression; None where it is not known.

    ``step`` is the traced step of ``instance``. Of what rewrites and corrections of strides have added to it,
    a tensor is taken to be of the same size as what it is made of, if that has the same shape.
    """
    made: dict[str, deque[int]] = {}
    for value in step.graph.values:
        made.setdefault(value.name, deque()).append(value.id)
    found: list[Size | None] = [None] * len(step.graph.values)
    seen: set[int] = set()
    for node in step.module.graph.nodes:
        new = made.get(node.name, deque())
        parts, origin = tensors(node.meta.get("val")), instance.origins.get(node)
        symbolic = tensors(origin.meta.get("val")) if origin is not None else [None] * len(parts)
        for part, known in zip(parts, symbolic, strict=True):
            key = int(part.untyped_storage()._cdata)
            if key in seen or not new:
                continue
            seen.add(key)
            size = storage_size(known) if known is not None else _like_source(part, node, instance)
            found[new.popleft()] = size
    return tuple(found)


def _like_source(part: torch.Tensor, node: fx.Node, instance: Instance) -> Size | None:
    """Bytes of a dense tensor that is made of another of the same shape."""
    item, device = part.element_size(), part.device.type
    if part.untyped_storage().nbytes() != prod(part.shape) * item or allocated_bytes(1, device) != 1:
        return None
    shapes = set()
    for source in node.all_input_nodes:
        given, origin = source.meta.get("val"), instance.origins.get(source)
        if origin is not None and isinstance(given, torch.Tensor) and given.shape == part.shape:
            shapes.add(tuple(map(size_of, origin.meta["val"].shape)))
    return combined("*", item, *shapes.pop()) if len(shapes) == 1 else None

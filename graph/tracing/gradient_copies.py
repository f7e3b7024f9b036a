"""Copies of gradients that autograd would make outside the joint graph, made inside it and so planned.

PyTorch's ``AccumulateGrad`` takes a parameter's first gradient as it is only if nothing else refers to
the tensor and its strides are the parameter's (``torch/csrc/autograd/functions/accumulate_grad.h``).
Otherwise it makes a copy: memory of the step that no graph shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hybridremat.graph.private_torch import arg_tree_leaves, detect_fake_mode, input_gradients, step_inputs
from hybridremat.graph.tracing.fx_nodes import storages, tensors


def copy_shared_gradients(module: fx.GraphModule) -> None:
    """Insert a copy behind every gradient that autograd would not take as it is, in place.

    These are gradients returned for several inputs, views of a tangent or of an input, gradients whose
    strides are not the input's (a broadcast scalar), and sparse ones with parts that are not dense (of
    indices that are a column of a table).
    """
    output = next(iter(module.graph.find_nodes(op="output")))
    results = list(arg_tree_leaves(*output.args))
    given = {s for n in module.graph.find_nodes(op="placeholder") for s in storages(n)}
    taken: set[int] = set()
    inputs = step_inputs(module)
    for number, index in input_gradients(module).items():
        node, primal = results[index], inputs[number]
        if not isinstance(node, fx.Node) or _tensor(node) is None or _tensor(primal) is None:
            continue
        if _is_copied(node, primal, taken | given):
            results[index] = _copied(module.graph, output, node, primal)
        taken |= storages(node)
    output.args = (tuple(results),)
    module.recompile()


def _tensor(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _is_copied(node: fx.Node, primal: fx.Node, held: set[int]) -> bool:
    """Whether autograd copies a gradient; ``held``: storages that others hold."""
    gradient = _tensor(node)
    if gradient is not None and gradient.layout is not torch.strided:
        # it shares the parts of a sparse one, whoever else holds them, if they are dense
        return not all(part.is_contiguous() for part in tensors(gradient))
    return bool(storages(node) & held) or not _same_layout(node, primal)


def _same_layout(node: fx.Node, primal: fx.Node) -> bool:
    """Whether the strides of both agree, in all dimensions longer than one."""
    gradient, parameter = _tensor(node), _tensor(primal)
    assert gradient is not None and parameter is not None
    pairs = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(mine == theirs for size, mine, theirs in pairs if size != 1)


def _copied(graph: fx.Graph, output: fx.Node, node: fx.Node, primal: fx.Node) -> fx.Node:
    gradient, parameter = _tensor(node), _tensor(primal)
    mode = detect_fake_mode([gradient])
    assert gradient is not None and parameter is not None and mode is not None
    last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last and not parameter.is_contiguous() else torch.contiguous_format
    target = torch.ops.aten.clone.default
    keywords: dict[str, Any] = {"memory_format": layout} if gradient.layout is torch.strided else {}
    with graph.inserting_before(output):
        copy = graph.call_function(target, (node,), keywords)
    copy.meta = dict(node.meta)
    with mode:
        copy.meta["val"] = target(gradient, **keywords)
    return copy

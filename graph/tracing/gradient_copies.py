"""Copies of gradients that autograd would make outside the joint graph, made inside it and so planned.

PyTorch's ``AccumulateGrad`` takes a parameter's first gradient as it is only if nothing else refers to
the tensor and its strides are the parameter's (``torch/csrc/autograd/functions/accumulate_grad.h``).
Otherwise it makes a copy: memory of the step that no graph shows.
"""

from __future__ import annotations

import torch
from torch import fx

from hybridremat.graph.private_torch import arg_tree_leaves, detect_fake_mode
from hybridremat.graph.tracing.fx_nodes import storages


def copy_shared_gradients(module: fx.GraphModule, num_outputs: int) -> None:
    """Insert a copy behind every gradient that autograd would not take as it is, in place.

    These are gradients returned for several inputs, views of a tangent or of an input, and gradients
    whose strides are not the input's (a broadcast scalar).
    """
    output = next(iter(module.graph.find_nodes(op="output")))
    results = list(arg_tree_leaves(*output.args))
    primals = [n for n in module.graph.find_nodes(op="placeholder") if not n.name.startswith("tangents_")]
    given = {s for n in module.graph.find_nodes(op="placeholder") for s in storages(n)}
    taken: set[int] = set()
    for index, primal in zip(range(num_outputs, len(results)), primals, strict=False):
        node = results[index]
        if not isinstance(node, fx.Node) or _tensor(node) is None or _tensor(primal) is None:
            continue
        # autograd shares the indices and values of a sparse gradient, whoever else holds them
        if not _is_sparse(node) and (storages(node) & (taken | given) or not _same_layout(node, primal)):
            results[index] = _copied(module.graph, output, node, primal)
        taken |= storages(node)
    output.args = (tuple(results),)
    module.recompile()


def _tensor(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _is_sparse(node: fx.Node) -> bool:
    tensor = _tensor(node)
    return tensor is not None and tensor.layout is not torch.strided


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
    with graph.inserting_before(output):
        copy = graph.call_function(target, (node,), {"memory_format": layout})
    copy.meta = dict(node.meta)
    with mode:
        copy.meta["val"] = target(gradient, memory_format=layout)
    return copy

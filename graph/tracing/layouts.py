"""Strides that kernels really return, where PyTorch traced others, and views that these do not allow.

For some kernels PyTorch's fake tensors have other strides than the results (BatchNorm of a transposed input,
``mse_loss_backward``). A ``reshape`` behind them was then traced as a view, and the step fails where plain
PyTorch makes a copy. Here the strides in the graph become the real ones, and such a view gets its copy, so
that the plan counts it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from hybridremat.graph.private_torch import OpOverload, detect_fake_mode
from hybridremat.graph.tracing.fx_nodes import has_effects, is_mutation, tensors

RealResults = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]
"""Runs a node's kernel alone; the second argument has the fake values of its inputs.

Returns the result, or None where it cannot be run.
"""

_VIEW = torch.ops.aten.view.default
_COPY = torch.ops.aten.copy.default


def lay_out_copies(graph: fx.Graph) -> None:
    """Give what ``aten.copy`` returns the layout that it comes in, in place, also with symbols for sizes.

    A write into a part of a tensor (``shifted[:, 1:] = tokens[:, :-1]``) is captured as a copy: its kernel
    clones all the memory that this part lives in, and returns the part in the clone. PyTorch traces its
    strides without the rest. A copy that is viewed stays as traced.
    """
    for node in graph.find_nodes(op="call_function", target=_COPY):
        written = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
        mode = detect_fake_mode([written])
        if mode is None or not isinstance(written, torch.Tensor) or written.layout is not torch.strided:
            continue
        if any(map(_is_view, node.users)):
            continue
        with mode:
            elements = written.untyped_storage().nbytes() // written.element_size()
            base = torch.empty(elements, dtype=written.dtype, device=written.device)
            node.meta["val"] = base.as_strided(written.shape, written.stride(), written.storage_offset())


def correct_layouts(module: fx.GraphModule, real: RealResults) -> None:
    """Give nodes the strides of what ``real`` returns, in place, and copy what can no longer be viewed."""
    placeholders = module.graph.find_nodes(op="placeholder")
    mode = detect_fake_mode([n.meta.get("val") for n in placeholders])
    if mode is None or any(_has_symbols(node) for node in module.graph.nodes):
        return  # symbolic sizes are refused later
    corrected = _Corrected(module.graph, mode, real)
    for node in list(module.graph.nodes):
        if node.op == "call_function":
            corrected.visit(node)


class _Corrected:
    """The nodes that have got another fake value so far."""

    def __init__(self, graph: fx.Graph, mode: Any, real: RealResults) -> None:
        self._graph, self._mode, self._real = graph, mode, real
        self._nodes: set[fx.Node] = set()
        self._other_strides: set[fx.Node] = set()

    def visit(self, node: fx.Node) -> None:
        """Correct one node, whose inputs are correct."""
        moved = self._nodes.intersection(node.all_input_nodes)
        if node.target is operator.getitem or _is_view(node):
            if moved:
                self._view_again(node)
        elif self._other_strides.intersection(moved) or is_doubtful(node):
            self._compare(node)

    def _view_again(self, node: fx.Node) -> None:
        try:
            value = self._faked(node)
        except (RuntimeError, ValueError):
            if node.target is not _VIEW:
                raise
            self._copy_before(node)
            value = self._faked(node)
        self._replace(node, value)

    def _copy_before(self, view: fx.Node) -> None:
        """What ``reshape`` does with a tensor that cannot be viewed."""
        (source, *_), target = view.args, torch.ops.aten.clone.default
        assert isinstance(source, fx.Node)
        with self._graph.inserting_before(view):
            copy = self._graph.call_function(target, (source,), {"memory_format": torch.contiguous_format})
        copy.meta = dict(view.meta)
        copy.meta["val"] = self._faked(copy)
        view.replace_input_with(source, copy)

    def _compare(self, node: fx.Node) -> None:
        found = self._real(node, {each: each.meta.get("val") for each in node.all_input_nodes})
        believed = node.meta.get("val")
        if found is None or _strides(found) == _strides(believed):
            return
        with self._mode:
            self._replace(node, _laid_out_as(believed, found))

    def _faked(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        assert callable(node.target)
        with self._mode:
            return node.target(*args, **kwargs)

    def _replace(self, node: fx.Node, value: Any) -> None:
        if _strides(value) != _strides(node.meta.get("val")):
            self._other_strides.add(node)
        self._nodes.add(node)
        node.meta["val"] = value


def _has_symbols(node: fx.Node) -> bool:
    sizes = (size for tensor in tensors(node.meta.get("val")) for size in tensor.shape)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    if str(node.target) == "aten._unsafe_view.default":  # its schema does not say so
        return True
    return any(each.alias_info is not None for each in node.target._schema.returns)


def is_doubtful(node: fx.Node) -> bool:
    """Whether a kernel's result may have other strides than were traced.

    Not where all is contiguous, as traced strides follow those of inputs; nor for products, convolutions and
    attention, whose strides PyTorch traces by what the device does.
    """
    if not isinstance(node.target, OpOverload) or node.target._overloadpacket in flop_registry:
        return False
    inputs = [t for each in node.all_input_nodes for t in tensors(each.meta.get("val"))]
    return not all(map(_is_plain, [*inputs, *tensors(node.meta.get("val"))])) and _can_run(node)


def _can_run(node: fx.Node) -> bool:
    return not is_mutation(node) and not has_effects(node)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is laid out as new ones are, also in dimensions of one element.

    By the strides of these, too, a kernel tells one memory format from another.
    """
    made = torch.empty(tensor.shape, device="meta")
    return tensor.layout is not torch.strided or tensor.dim() < 2 or tensor.stride() == made.stride()


def _strides(value: Any) -> list[tuple[int, ...] | None]:
    """The strides of each strided tensor with elements."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [
        part.stride()
        if isinstance(part, torch.Tensor) and part.layout is torch.strided and part.numel()
        else None
        for part in parts
    ]


def _laid_out_as(believed: Any, found: Any) -> Any:
    """The fake value with the strides of the real one."""
    if isinstance(believed, (list, tuple)):
        return type(believed)(map(_laid_out_as, believed, found))
    if not isinstance(believed, torch.Tensor) or _strides(believed) == _strides(found):
        return believed
    if not isinstance(found, torch.Tensor):  # a gradient that was not asked for is traced, and does not come
        return believed
    return torch.empty_strided(
        tuple(believed.shape), found.stride(), dtype=believed.dtype, device=believed.device
    )

"""What is made simple in a joint graph with symbols for sizes, before it is copied with numbers.

Each size is computed once. Calls that PyTorch traces only where sizes are symbols go: with a number as size,
``x[:, :n]`` of all that there is gives ``x``; with a symbol it is a slice, and its gradient would be copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hybridremat.graph.sizes import Size, Sizes, evaluated
from hybridremat.graph.tracing.alias_analysis import TraceError
from hybridremat.graph.tracing.fx_nodes import joint_outputs, put_back, slice_arguments
from hybridremat.graph.tracing.size_expressions import size_of

_SLICE = torch.ops.aten.slice.Tensor


def is_size(node: object) -> bool:
    """Whether a node is a size, an input or computed."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.SymInt)


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_number(node: object) -> bool:
    """Whether a node is a size, or a fraction or a condition that is computed from sizes."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), _NUMBERS)


def number_of(node: fx.Node, sizes: Sizes) -> Any:
    """What a node that is a number is at some sizes.

    Raises
    ------
    TraceError
        If it depends on data.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return evaluated(size_of(value), sizes)
    if not is_number(node) or node.op != "call_function":
        raise TraceError(f"the number {node.name} depends on the data")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: number_of(each, sizes))
    computed: Any = node.target
    return computed(*args, **kwargs)


@dataclass(frozen=True)
class Symbol:
    """A size, or a fraction that is computed from some, as an argument of a call.

    ``of``: the size, or of a fraction the function, its arguments and its keywords.
    """

    of: Any


def symbol_of(node: fx.Node) -> int | Symbol:
    """What a node that is a number is at every size; a number if it depends on none."""
    if is_size(node):
        size: Size = size_of(node.meta["val"])
        return size if isinstance(size, int) else Symbol(size)
    if node.op != "call_function":
        raise TraceError(f"the number {node.name} depends on the data")
    args, kwargs = fx.map_arg((node.args, node.kwargs), _symbol)
    return Symbol((node.target, args, kwargs))


def number_at(symbol: Symbol, sizes: Sizes) -> Any:
    """The number that this is at some sizes."""
    if not isinstance(symbol.of, tuple):
        return evaluated(symbol.of, sizes)
    args, kwargs = symbol.of[1:]
    given = (_number(each, sizes) for each in args)
    named = {name: _number(each, sizes) for name, each in kwargs.items()}
    return symbol.of[0](*given, **named)


def _symbol(node: fx.Node) -> Any:
    return symbol_of(node)


def _number(item: Any, sizes: Sizes) -> Any:
    return number_at(item, sizes) if isinstance(item, Symbol) else item


def merge_sizes(module: fx.GraphModule) -> None:
    """Let each size be computed once, in place; one that is an input is read there, and from no tensor."""
    first: dict[Size, fx.Node] = {}
    for node in list(module.graph.nodes):
        if not is_size(node):
            continue
        size = size_of(node.meta["val"])
        if node.op == "placeholder":
            first.setdefault(size, node)
            continue
        if isinstance(size, int):
            _put_number(node, size)
        elif (earlier := first.setdefault(size, node)) is not node:
            node.replace_all_uses_with(earlier)
        if not node.users:
            module.graph.erase_node(node)


def _put_number(node: fx.Node, number: int) -> None:
    for user in list(node.users):

        def put(each: fx.Node) -> Any:
            return number if each is node else each

        user.args, user.kwargs = fx.map_arg(user.args, put), fx.map_arg(user.kwargs, put)


def drop_idle_slices(module: fx.GraphModule, num_outputs: int) -> None:
    """Drop slices of all that there is, and what puts one back or writes it, in place.

    Not where one is an output of the forward: there it is a tensor of its own.
    """
    outputs = joint_outputs(module)[:num_outputs]
    for node in list(module.graph.nodes):
        source = _handed_on(node)
        if source is not None and node not in outputs:
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)


def _handed_on(node: fx.Node) -> fx.Node | None:
    """What a slice gives as it is; None for every other call."""
    if node.op != "call_function":
        return None
    source: Any = None
    if node.target is _SLICE:
        source, (_, start, _, step) = node.args[0], slice_arguments(node)
    elif node.target is torch.ops.aten.slice_scatter.default:  # what is written is all that there is then
        source, (_, start, _, step) = node.args[1], slice_arguments(node)
    elif node.target is torch.ops.aten.slice_backward.default and (parts := put_back(node)) is not None:
        source, _, _, start, _, step = parts
    if not isinstance(source, fx.Node) or start not in (0, None) or step != 1:
        return None
    return source if shape_of(node) == shape_of(source) and _alike(node, source) else None


def _alike(node: fx.Node, source: fx.Node) -> bool:
    """Whether what is written into a tensor has the layout and the type that it keeps; slices are views."""
    if node.target is not torch.ops.aten.slice_scatter.default:
        return True
    made, written = node.meta["val"], source.meta["val"]
    layouts = [tuple(map(size_of, value.stride())) for value in (made, written)]
    return bool(layouts[0] == layouts[1] and made.dtype == written.dtype)


def shape_of(node: fx.Node) -> tuple[Size, ...] | None:
    """The shape of a node's tensor as expressions: two are equal only if they are at every size."""
    value = node.meta.get("val")
    return tuple(map(size_of, value.shape)) if isinstance(value, torch.Tensor) else None

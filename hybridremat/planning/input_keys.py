"""The keys that the planned steps of a wrapped model are kept by."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hybridremat.compiler.capture import model_device
from hybridremat.compiler.sample_inputs import input_leaves

PLAIN = bool, int, float, str, type(None)

Shapes = tuple[tuple[int, ...] | None, ...]
"""The shape of each input that is a tensor, as ``input_leaves`` counts inputs."""


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """The shapes of the tensors of a call."""
    leaves = input_leaves((tuple(args), dict(kwargs)))
    return tuple(tuple(each.shape) if isinstance(each, torch.Tensor) else None for each in leaves)


def input_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Shapes, dtypes and devices of the tensors in a call, and its plain values.

    Calls with different keys need different graphs; calls with equal keys may (Dynamo's guards decide).
    """
    return _key(args, kwargs, lambda tensor: tuple(tensor.shape))


def ranks_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """As :func:`input_key`, with numbers of dimensions and their order in memory in place of shapes."""
    return _key(args, kwargs, lambda tensor: (tensor.dim(), order_in_memory(tensor)))


def order_in_memory(tensor: torch.Tensor) -> Hashable:
    """The dimensions from the outermost in memory; None if there are gaps between elements, as in a slice."""
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides, expected = tensor.stride(), 1
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= tensor.shape[dim]
    return tuple(order)


def has_gaps(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor in a call has gaps between its elements."""
    leaves = input_leaves((tuple(args), dict(kwargs)))
    return any(isinstance(each, torch.Tensor) and order_in_memory(each) is None for each in leaves)


def has_idle_strides(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a dimension of size 1 keeps the stride of a larger tensor, as in its first row, cut short.

    It would be a size of its own to a capture with symbols.
    """
    for each in input_leaves((tuple(args), dict(kwargs))):
        if isinstance(each, torch.Tensor) and each.layout == torch.strided and each.is_contiguous():
            expected = 1
            for size, stride in zip(reversed(each.shape), reversed(each.stride()), strict=True):
                if size == 1 and stride != expected:
                    return True
                expected *= max(1, size)
    return False


def _key(
    args: Sequence[Any], kwargs: Mapping[str, Any], shape: Callable[[torch.Tensor], Hashable]
) -> Hashable:
    seen: dict[int, int] = {}

    def entry(leaf: object) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            first = seen.setdefault(id(leaf), len(seen))  # Dynamo captures a tensor that is passed twice so
            return shape(leaf), leaf.dtype, leaf.device, first
        if isinstance(leaf, PLAIN):
            return type(leaf), leaf if leaf == leaf else "nan"  # which is not equal to itself
        return type(leaf).__qualname__

    named = sorted(kwargs.items())
    return (
        tuple(entry(leaf) for leaf in input_leaves(list(args))),
        tuple((name, tuple(entry(leaf) for leaf in input_leaves(item))) for name, item in named),
    )


def shape_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The shapes of the tensors in a call, each once, the first three."""
    tensors = [leaf for leaf in input_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    shapes = list(dict.fromkeys("×".join(map(str, each.shape)) or "scalar" for each in tensors))
    return ", ".join([*shapes[:3], *(["…"] if len(shapes) > 3 else [])])


def unlike(args: Sequence[Any], kwargs: Mapping[str, Any], known: Iterable[Any]) -> list[str]:
    """The named inputs in which a call differs from the one of ``known`` that is most like it.

    ``known``: what :func:`input_key` made of other calls.
    """
    given: Any = input_key(args, kwargs)
    same_args = [{*named} ^ {*given[1]} for positional, named in known if positional == given[0]]
    names: list[list[str]] = [sorted({name for name, _ in each}) for each in same_args]
    return min(names, key=len, default=[])


def numbers_apart(call: Any, known: Iterable[Any]) -> list[str]:
    """The inputs whose numbers alone tell a call from others, if there are two such others.

    ``call`` and ``known``: what :func:`input_key` made of calls.
    """
    mine, found = _by_name(call), list[list[str]]()
    for theirs in map(_by_name, known):
        if theirs.keys() == mine.keys():
            names = [name for name, entry in mine.items() if entry != theirs[name]]
            if names and all(mine[n][0] is theirs[n][0] in (int, float) for n in names):
                found.append(names)
    return sorted({name for names in found for name in names}) if len(found) > 1 else []


def _by_name(call: Any) -> dict[str, Any]:
    positional, named = call
    entries = {f"args[{place}]": entry for place, entry in enumerate(positional)}
    return entries | {
        name if len(every) == 1 else f"{name}[{place}]": entry
        for name, every in named
        for place, entry in enumerate(every)
    }


def every_dimension(shapes: Shapes) -> dict[int, tuple[int, ...]]:
    """All dimensions of inputs that can be symbols: PyTorch makes numbers of sizes 0 and 1."""
    sized = {
        number: tuple(dim for dim, size in enumerate(shape or ()) if size > 1)
        for number, shape in enumerate(shapes)
    }
    return {number: dims for number, dims in sized.items() if dims}


def plain_state(model: nn.Module) -> Hashable:
    """What the modules keep of plain values, and their hooks: what a forward most often depends on."""
    modules = [vars(module) for module in model.modules()]
    hooks = [tuple(map(tuple, (each["_forward_pre_hooks"], each["_forward_hooks"]))) for each in modules]
    plain = [{name: item for name, item in each.items() if isinstance(item, PLAIN)} for each in modules]
    return tuple(hooks), tuple((name, type(item), item) for each in plain for name, item in each.items())


def conditions(model: nn.Module) -> Hashable:
    """Autocast, the modules in eval mode, and dtype and ``requires_grad`` of each parameter."""
    device = model_device(model)
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (
        autocast,
        tuple(module.training or not model.training for module in model.modules()),
        tuple((parameter.dtype, parameter.requires_grad) for parameter in model.parameters()),
    )

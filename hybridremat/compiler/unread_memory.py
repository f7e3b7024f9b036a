"""A model on the ``meta`` device as one on a CPU whose memory nobody touches.

PyTorch captures a step on ``meta`` tensors otherwise than on any device: attention is decomposed, and the
backward of ``cross_entropy`` is empty. On CPU it captures what runs. Memory that is allocated and never
written takes address space alone, and planning for another device runs no kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hybridremat.errors import ModelError
from hybridremat.graph.private_torch import is_traceable_wrapper_subclass, tree_leaves, tree_map


def on_unread_memory(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """A copy of a model and its inputs with CPU tensors in place of those on ``meta``; the same without any.

    Tensors that are one in the model are one in the copy. What they hold is undefined.
    """
    held = _on_meta(_tensors(model))
    if held:
        with untouched():
            model = copy.deepcopy(model, {id(tensor): _like(tensor) for tensor in held})
    if _on_meta(tree_leaves((args, kwargs))):
        with untouched():
            args, kwargs = tree_map(_input_like, (args, kwargs))
    return model, args, kwargs


def require_memory(model: nn.Module) -> None:
    """Refuse a model on the ``meta`` device where its step is to run, or to be tried.

    Raises
    ------
    ModelError
    """
    if _on_meta(_tensors(model)):
        raise ModelError(
            f"this {type(model).__name__} is on the meta device, where nothing can run. Give it memory "
            '(model.to_empty(device=…)), or plan for a device that is not here: device_spec="h100"'
        )


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    return (*model.parameters(), *model.buffers())


def _on_meta(items: Iterable[object]) -> list[torch.Tensor]:
    return [item for item in items if isinstance(item, torch.Tensor) and item.is_meta]


@contextmanager
def untouched() -> Iterator[None]:
    """Where memory is not filled as it is allocated, which PyTorch can be told to do."""
    settings: Any = torch.utils.deterministic
    fill, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill


def _like(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):  # the mesh of a DTensor
        return tensor
    is_split: bool = is_traceable_wrapper_subclass(tensor)
    empty = _part_like(tensor) if is_split else _empty_like(tensor)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _empty_like(tensor: Any) -> Any:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _part_like(tensor: Any) -> Any:
    """Of a tensor that is split, the part of this rank."""
    names, context = tensor.__tensor_flatten__()
    inner = {name: _like(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


def _input_like(item: object) -> object:
    return _like(item) if isinstance(item, torch.Tensor) and item.is_meta else item

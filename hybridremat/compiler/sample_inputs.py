"""Tensors of sample inputs, wherever they are, and copies for trial runs that may change them.

PyTorch's pytree takes a batch that is an object (a dataclass, BatchEncoding, PyG's Batch) for one leaf.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hybridremat.graph.private_torch import tree_leaves, tree_map
from hybridremat.graph.tracing.non_leaf import non_leaf

T = TypeVar("T")

_ALIGNMENT = 64  # bytes; of every copy, as of what PyTorch allocates
_SHARED: Final = nn.Module, DataLoader, Dataset
"""What a batch may refer to that is no part of it: neither looked into nor copied."""

_CLOSED: Final = *_SHARED, Tensor, type, FunctionType, ModuleType, str, int, float

MOST_NESTED: Final = 3
"""Objects inside one another: a batch, its store, and what is in that."""


def input_leaves(inputs: object) -> list[Any]:
    """The leaves of inputs, with the tensors of an object in its place, if it has any."""
    return [each for leaf in tree_leaves(inputs) for each in (_tensors_in(leaf) or [leaf])]


def with_tensors(inputs: T, made: Mapping[int, Tensor]) -> T:
    """The same structure with other tensors, by the identity of those in their place.

    Objects are copied; one that cannot be is itself, with its own tensors.
    """

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return made.get(id(leaf), leaf)
        if not _tensors_in(leaf):
            return leaf
        shared = {id(each): each for each in _inside(leaf, MOST_NESTED, set()) if isinstance(each, _SHARED)}
        try:
            return copy.deepcopy(leaf, {**made, **shared})
        except Exception:  # noqa: BLE001 - whatever a user's object raises: a lock or a file in it, for one
            return leaf

    result: T = tree_map(replaced, inputs)
    return result


def _tensors_in(leaf: object) -> list[Tensor]:
    if isinstance(leaf, Tensor):
        return [leaf]
    found = () if isinstance(leaf, _CLOSED) else _inside(leaf, MOST_NESTED, set())
    return [each for each in found if isinstance(each, Tensor)]


def _inside(value: object, depth: int, seen: set[int]) -> Iterator[Any]:
    """The tensors of an object, and what it shares with others."""
    seen.add(id(value))
    own = [each.name for each in fields(value)] if is_dataclass(value) else getattr(value, "__dict__", ())
    for name in list(own) if depth else ():
        for leaf in tree_leaves(getattr(value, name, None)):
            if isinstance(leaf, (Tensor, *_SHARED)):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, _CLOSED):
                yield from _inside(leaf, depth - 1, seen)


def copied(inputs: T, model: nn.Module) -> T:
    """The same structure, in new containers, with copies of its tensors.

    Overlaps, strides, ``requires_grad`` and being a leaf are kept. Tensors in the model's own memory are not
    copied.
    """
    own = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors = {id(leaf): leaf for leaf in input_leaves(inputs) if isinstance(leaf, Tensor)}
    given = [tensor for tensor in tensors.values() if not is_strided(tensor) or _memory(tensor) not in own]
    copies = {id(each): each.detach().clone() for each in given if not is_strided(each)}
    for group in _overlapping([tensor for tensor in given if is_strided(tensor)]):
        copies.update(_copy_together(group))
    made = {key: _as_given(tensors[key], each) for key, each in copies.items()}
    return with_tensors(inputs, made)


def is_strided(tensor: Tensor) -> bool:
    """Whether storage, offset, shape and strides describe a tensor fully."""
    usual = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return usual and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_meta)


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    """Identifies the storage of a tensor; an empty one is equal to no other."""
    if not is_strided(tensor) or tensor.untyped_storage().nbytes() == 0:
        return tensor.device, -id(tensor)
    return tensor.device, tensor.untyped_storage().data_ptr()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one after its last."""
    size, start = tensor.element_size(), int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start * size, start * size
    reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + int(reach) + 1) * size


def _overlapping(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors that share bytes, not storages: a batch may be a few rows of many gigabytes."""
    group: list[Tensor] = []
    memory, end = None, 0
    for tensor in sorted(tensors, key=lambda t: (str(t.device), _memory(t)[1], _extent(t))):
        start, stop = _extent(tensor)
        if group and (_memory(tensor) != memory or start >= end):
            yield group
            group = []
        end = max(end, stop) if group else stop
        memory = _memory(tensor)
        group.append(tensor)
    if group:
        yield group


def _copy_together(group: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copies of overlapping tensors, which overlap in the same way."""
    low = min(_extent(tensor)[0] for tensor in group) // _ALIGNMENT * _ALIGNMENT
    high = max(_extent(tensor)[1] for tensor in group)
    region = torch.empty(0, dtype=torch.uint8, device=group[0].device)
    with torch.no_grad():
        region.set_(group[0].untyped_storage(), low, (max(0, high - low),), (1,))
        storage = region.clone().untyped_storage()
    copies = {}
    for tensor in group:
        offset = (_extent(tensor)[0] - low) // tensor.element_size()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copies[id(tensor)] = empty.set_(storage, offset, tensor.shape, tensor.stride())
    return copies


def _as_given(tensor: Tensor, copy: Tensor) -> Tensor:
    """The copy with the tensor's attributes and its role in autograd."""
    if tensor.requires_grad:
        copy = copy.requires_grad_() if tensor.is_leaf else non_leaf(copy)
    if type(copy) is Tensor:
        copy.__dict__.update(tensor.__dict__)
    return copy

"""Copies of sample inputs for a forward to run on, which may change them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from hybridremat.graph.private_torch import tree_leaves, tree_map
from hybridremat.graph.tracing.non_leaf import non_leaf

T = TypeVar("T")

_ALIGNMENT = 64  # bytes; of every copy, as of what PyTorch allocates


def copied(inputs: T, model: nn.Module) -> T:
    """The same structure with copies of its tensors, in containers of its own.

    Tensors that overlap in memory do so in the copy, strides stay, and what requires a gradient does, as a
    leaf or not. Tensors in objects that PyTorch's pytree does not open, and those that live in the model's
    own memory, stay as they are.
    """
    own = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors = {id(leaf): leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    given = [tensor for tensor in tensors.values() if not is_plain(tensor) or _memory(tensor) not in own]
    copies: dict[int, Tensor] = {id(tensor): _copy_alone(tensor) for tensor in given if not is_plain(tensor)}
    for group in _overlapping([tensor for tensor in given if is_plain(tensor)]):
        copies.update(_copy_together(group))
    made = {key: _as_given(tensors[key], copy) for key, copy in copies.items()}
    result: T = tree_map(lambda leaf: made.get(id(leaf), leaf), inputs)
    return result


def is_plain(tensor: Tensor) -> bool:
    """Whether strides over a storage say all about a tensor."""
    usual = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return usual and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_meta)


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    """Names the storage of a tensor; an empty one has a name of its own."""
    if not is_plain(tensor) or tensor.untyped_storage().nbytes() == 0:
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
    """Groups of tensors that share bytes: a batch may be a few rows of a storage of many gigabytes."""
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
    """Copies of tensors of one storage that lie in one copy of its bytes."""
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


def _copy_alone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _as_given(tensor: Tensor, copy: Tensor) -> Tensor:
    """The copy with the marks of the tensor, and with its place in autograd."""
    if tensor.requires_grad:
        copy = copy.requires_grad_() if tensor.is_leaf else non_leaf(copy)
    if type(copy) is Tensor:
        copy.__dict__.update(tensor.__dict__)
    return copy

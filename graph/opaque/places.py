"""Where the tensors that a call returns or saves live: in what it was given, or in new storages.

An op of a joint graph returns new storages alone, each once. Whatever else shares them is described by a
place, from which it is made again without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hybridremat.errors import CaptureError, PlanError


@dataclass(frozen=True)
class Layout:
    """Size, strides and type of a tensor, and its device."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """The layout of a tensor, wherever it starts."""
        return Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """A new tensor laid out so."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def made_up(self) -> Tensor:
        """A new tensor of numbers that kernels accept: between -0.5 and 0.5, integers 0, masks true."""
        real = self.empty()
        extent = real.untyped_storage().nbytes() // real.element_size()
        flat = torch.as_strided(real, (extent,), (1,), 0)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            flat.copy_(torch.rand(extent, device=self.device) - 0.5)
        else:
            flat.fill_(self.dtype == torch.bool)
        return real


@dataclass(frozen=True)
class Place:
    """A tensor as a view: of the new storage ``index``, or (not ``new``) of the given tensor ``index``.

    ``offset`` counts elements from where that one starts.
    """

    new: bool
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: Tensor) -> Tensor:
        """The tensor, from what it is a view of."""
        if (self.size, self.stride, self.offset) == (tuple(base.shape), tuple(base.stride()), 0):
            return base
        return torch.as_strided(base, self.size, self.stride, base.storage_offset() + self.offset)


@dataclass(frozen=True)
class Description:
    """Places of tensors (None for what is none), and the layouts of the new storages that they live in."""

    places: tuple[Place | None, ...]
    new: tuple[Layout, ...]

    def new_in(self, results: Sequence[Tensor | None], given: Sequence[Tensor]) -> list[Tensor]:
        """The new storages among the results of another run.

        Raises
        ------
        PlanError
            If the results are not laid out as described.
        """
        new: dict[int, Tensor] = {}
        fits = len(results) == len(self.places)
        for place, result in zip(self.places, results, strict=False):
            if place is None or result is None:
                fits = fits and place is None and result is None
                continue
            if place.new and place.index not in new:
                whole = _whole(result, self.new[place.index])
                if whole is None:
                    fits = False
                    break
                new[place.index] = whole
            base = new[place.index] if place.new else given[place.index]
            fits = fits and _memory(base) == _memory(result) and place == _place(place, result, base)
        if not fits or len({_memory(each) for each in new.values()}) < len(self.new):
            raise PlanError(
                "an opaque call returned or saved other tensors than in its trial: their shapes, or which "
                "they are, depend on the numbers that it is given. It cannot be one opaque op."
            )
        return [new[index] for index in range(len(self.new))]


def describe(results: Sequence[Tensor | None], given: Sequence[Tensor]) -> Description:
    """Describe tensors that a call returned or saved, and what it was given.

    Raises
    ------
    CaptureError
        For tensors that are not strided, and those of several types in one storage.
    """
    tensors = [each for each in results if each is not None]
    if any(each.layout is not torch.strided for each in tensors):
        raise CaptureError("an opaque call returns or saves a sparse tensor, which cannot be planned")
    known = {_memory(each): index for index, each in reversed(list(enumerate(given)))}
    shared: dict[int, list[Tensor]] = {}
    for each in tensors:
        if _memory(each) not in known:
            shared.setdefault(_memory(each), []).append(each)
    bases = {memory: _base(group) for memory, group in shared.items()}
    order = {memory: index for index, memory in enumerate(bases)}

    def place(each: Tensor | None) -> Place | None:
        if each is None:
            return None
        memory = _memory(each)
        if memory in known:
            return _place(Place(False, known[memory], (), (), 0), each, given[known[memory]])
        return _place(Place(True, order[memory], (), (), 0), each, bases[memory])

    return Description(tuple(map(place, results)), tuple(map(Layout.of, bases.values())))


def _base(group: Sequence[Tensor]) -> Tensor:
    """The storage that some tensors share as one tensor: one of them if it fills the storage."""
    if len({each.dtype for each in group}) > 1:
        raise CaptureError("an opaque call returns or saves one storage as tensors of several types")
    size = group[0].untyped_storage().nbytes()
    whole = (each for each in group if each.numel() * each.element_size() == size)
    return next(whole, torch.as_strided(group[0], (size // group[0].element_size(),), (1,), 0))


def _whole(tensor: Tensor, layout: Layout) -> Tensor | None:
    """The storage of a tensor as one of that layout; None if it does not fit."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    if count != prod(layout.size) or tensor.dtype is not layout.dtype:
        return None
    return torch.as_strided(tensor, layout.size, layout.stride, 0)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _place(like: Place, tensor: Tensor, base: Tensor) -> Place:
    offset = tensor.storage_offset() - base.storage_offset()
    return Place(like.new, like.index, tuple(tensor.shape), tuple(tensor.stride()), int(offset))

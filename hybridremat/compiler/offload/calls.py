"""What emitted graphs call to move values: a copy out, its end, a copy back, its end.

:func:`begin` gives a *ticket*, a tensor of eight bytes outside of PyTorch's allocator that the forward saves
for the backward. As long as autograd holds it, what it stands for stays: the store, where each value is in
it, and how the tensors were laid out that had it.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, fx

from hybridremat.errors import OffloadError
from hybridremat.graph.joint import host_bytes
from hybridremat.graph.private_torch import _neg_view

if TYPE_CHECKING:
    from hybridremat.compiler.offload.stores import Copying, Store, Stores


@dataclass
class Use:
    """One forward's values in a store.

    Attributes
    ----------
    store
        What holds them.
    taken
        Bytes of it that have been given away.
    offsets
        By move, its first byte.
    out
        The copies to it, by move.
    views
        By move: type, shape, strides and offset of each tensor that had it, and whether it is read as its
        conjugate or its negative.
    sizes
        By move: bytes.
    """

    store: Store
    taken: int = 0
    offsets: dict[int, int] = field(default_factory=dict)
    out: dict[int, Copying] = field(default_factory=dict)
    views: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    sizes: dict[int, tuple[int, torch.device]] = field(default_factory=dict)


class Fetched:
    """A tensor that a value comes back into. Nobody else gets its memory before that has ended."""

    def __init__(self, use: Use, move: int) -> None:
        size, device = use.sizes[move]
        self.use, self.move = use, move
        self.copy: Copying = None
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        self.copy = use.store.back(self.tensor, use.offsets[move], use.out[move])

    def wait(self) -> None:
        """Wait until the value is back."""
        copy, self.copy = self.copy, None
        if copy is not None:
            self.use.store.wait(copy)

    def __del__(self) -> None:
        """Of a step that failed before the value was read."""
        with suppress(OffloadError):
            self.wait()


_USES: dict[int, Use] = {}  # by the address of a ticket
_STORES = weakref.WeakValueDictionary[int, "Stores"]()  # by their numbers
_HELD: Final = "hybridremat_stores"  # in the metadata of a graph


def hold(stores: Stores, module: fx.GraphModule) -> None:
    """Let a graph hold its stores, which it names by their number."""
    _STORES[stores.number] = stores
    module.meta[_HELD] = stores


def hold_alike(module: fx.GraphModule, other: fx.GraphModule) -> None:
    """Let a copy of a graph hold its stores, if it has any."""
    if _HELD in module.meta:
        other.meta[_HELD] = module.meta[_HELD]


def begin(number: int) -> Tensor:
    """A forward starts. The ticket of its values.

    Raises
    ------
    OffloadError
        If there is no room for them. Nothing of the step has run.
    """
    stores = _STORES[number]
    use = Use(stores.take())
    block = (ctypes.c_char * 8)()
    ticket = torch.frombuffer(block, dtype=torch.uint8)
    _USES[ticket.data_ptr()] = use
    weakref.finalize(block, _end, ticket.data_ptr(), stores, use)
    return ticket


def _end(address: int, stores: Stores, use: Use) -> None:
    del _USES[address]
    stores.give_back(use.store, list(use.out.values()))


def _use_of(ticket: Tensor) -> Use:
    """What a ticket stands for; a copy of one stands for nothing.

    Raises
    ------
    OffloadError
        If it is a copy.
    """
    use = _USES.get(ticket.data_ptr())
    if use is None:
        raise OffloadError(
            "what the forward has saved is not what the backward gets: hooks on saved tensors "
            "(torch.autograd.graph.saved_tensors_hooks, for one) have copied it, and values that wait "
            "elsewhere cannot be found by a copy. Leave these hooks out around a model with offload="
        )
    return use


def send(ticket: Tensor, move: int, tensor: Tensor) -> Use:
    """Start to copy out a tensor's whole storage."""
    use, size = _use_of(ticket), tensor.untyped_storage().nbytes()
    offset, use.taken = use.taken, use.taken + host_bytes([size])
    if use.taken > use.store.size:
        raise OffloadError(f"more moves than the {use.store.size} bytes planned for; please report this")
    use.offsets[move], use.sizes[move] = offset, (size, tensor.device)
    use.out[move] = use.store.out(tensor, offset)
    return use


def freed(use: Use, move: int, *tensors: Tensor) -> None:
    """Wait until it is out, and note how the tensors are laid out that the backward reads; they may go then.

    Raises
    ------
    OffloadError
        If the copy failed.
    """
    use.store.wait(use.out[move])
    use.views[move] = [_laid_out(tensor) for tensor in tensors]


def fetch(ticket: Tensor, move: int) -> Fetched:
    """Make room on the device, and start to copy back."""
    return Fetched(_use_of(ticket), move)


def ready(fetched: Fetched, number: int) -> Tensor:
    """Wait until it is back; one of the tensors as it was, a view of a storage of its own.

    Raises
    ------
    OffloadError
        If the copy failed.
    """
    fetched.wait()
    dtype, shape, stride, offset, conjugate, negative = fetched.use.views[fetched.move][number]
    found = torch.empty(0, dtype=dtype, device=fetched.tensor.device)
    found.set_(fetched.tensor.untyped_storage(), offset, shape, stride)
    found = found.conj() if conjugate else found  # a view, too
    return _neg_view(found) if negative else found


def _laid_out(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
    return *layout, tensor.is_conj(), tensor.is_neg()


MOVING: Final = (begin, send, freed, fetch, ready)
"""All of them."""

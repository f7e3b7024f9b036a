"""Pinned host memory for all that moves in a step on a CUDA device, and the two streams that copy.

Pages are the process's own and not shared with what it forks. Nothing here has run on a GPU yet: tests record
the order of its calls.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Final

import torch
from torch import Tensor, cuda

from hybridremat.errors import OffloadError
from hybridremat.units import format_bytes

_STREAMS: Final[dict[int, tuple[cuda.Stream, cuda.Stream]]] = {}


class PinnedStore:
    """Host memory for the moves of a step (see :class:`~hybridremat.compiler.offload.stores.Store`)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pages = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages.madvise(mmap.MADV_DONTFORK)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        if int(cuda.cudart().cudaHostRegister(address, max(size, 1), 0)):
            raise OffloadError(
                f'offload="host": {format_bytes(size)} of host memory cannot be pinned; nothing has run. Set '
                "host_memory_limit= lower, or raise the memory that the process may lock (ulimit -l)"
            )
        weakref.finalize(self, _unpin, address, self._pages).atexit = False
        self._out, self._back = _STREAMS.setdefault(cuda.current_device(), (cuda.Stream(), cuda.Stream()))

    def out(self, tensor: Tensor, offset: int) -> cuda.Event:
        """Start to copy a tensor's whole storage to a place here, once it is computed."""
        self._out.wait_stream(cuda.current_stream())
        with cuda.stream(self._out):
            self._place(offset, tensor).copy_(_whole(tensor), non_blocking=True)
            event: cuda.Event = self._out.record_event()
            return event

    def back(self, tensor: Tensor, offset: int, after: cuda.Event) -> cuda.Event:
        """Start to copy into a tensor's whole storage what ``after`` has brought."""
        self._back.wait_stream(cuda.current_stream())  # its memory may have been another's
        self._back.wait_event(after)
        with cuda.stream(self._back):
            _whole(tensor).copy_(self._place(offset, tensor), non_blocking=True)
            event: cuda.Event = self._back.record_event()
            return event

    def wait(self, copy: cuda.Event) -> None:
        """Let no kernel run that is launched from now on before a copy has ended."""
        cuda.current_stream().wait_event(copy)

    def _place(self, offset: int, tensor: Tensor) -> Tensor:
        return torch.frombuffer(
            self._pages, dtype=torch.uint8, count=tensor.untyped_storage().nbytes(), offset=offset
        )


def _unpin(address: int, _: mmap.mmap) -> None:
    """Let go of pages that no copy uses any more."""
    cuda.synchronize()
    cuda.cudart().cudaHostUnregister(address)


def _whole(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

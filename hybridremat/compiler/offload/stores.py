"""What holds the values of steps while they are away from the device, and is used again from step to step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from hybridremat.compiler.offload.targets import Target
from hybridremat.errors import OffloadError

Copying = Any
"""A copy that has started; what starts it knows how to wait for it."""


class Store(Protocol):
    """Room for the values of one forward."""

    size: int

    def out(self, tensor: Tensor, offset: int) -> Copying:
        """Start to copy a tensor's whole storage to a place here. It is kept until then."""
        ...

    def back(self, tensor: Tensor, offset: int, after: Copying) -> Copying:
        """Start to copy into a tensor's whole storage what ``after`` has brought."""
        ...

    def wait(self, copy: Copying) -> None:
        """Let nothing run on before a copy has ended. Raises OffloadError if it failed."""
        ...


class Stores:
    """The stores of one plan: as many as forwards wait for their backward at one time."""

    def __init__(self, target: Target, device: str, offsets: Sequence[int], size: int) -> None:
        self.target, self.device, self.offsets, self.size = target, device, tuple(offsets), size
        self._free: list[tuple[Store, list[Copying]]] = []
        self._lock = threading.RLock()

    def take(self) -> Store:
        """A store that nobody uses.

        Raises
        ------
        OffloadError
            If there is no room for a further one.
        """
        with self._lock:
            known = self._free.pop() if self._free else None
        if known is None:
            return self._new()
        store, copies = known
        for copy in copies:  # of a step that failed half-way
            with suppress(OffloadError):
                store.wait(copy)
        return store

    def _new(self) -> Store:
        if self.device == "cpu":
            from hybridremat.compiler.offload.file_store import FileStore

            return FileStore(self.target.folder, self.size)
        from hybridremat.compiler.offload.pinned_store import PinnedStore

        return PinnedStore(self.size)

    def give_back(self, store: Store, copies: list[Copying]) -> None:
        """Nobody uses a store any more; some of its copies may not have ended."""
        with self._lock:
            self._free.append((store, copies))

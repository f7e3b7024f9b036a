"""What holds the values of steps while they are away from the device, and is used again from step to step.

Each value takes the next free bytes of it when it leaves: how many, a step's sizes tell.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from itertools import count
from typing import Any, Final, Protocol

from torch import Tensor

from hybridremat.compiler.offload.targets import Target
from hybridremat.errors import OffloadError
from hybridremat.units import format_bytes

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


_NUMBERS: Final = count()
_EVERY: Final = weakref.WeakSet["Stores"]()


class Room:
    """The most bytes that all stores of a model take (``host_memory_limit=``); None for any."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._taken = weakref.WeakSet[Store]()

    def require(self, size: int) -> None:
        """Raise OffloadError if there is no room for a further store of so many bytes."""
        held = sum(store.size for store in self._taken)
        if self.limit is not None and held + size > self.limit:
            raise OffloadError(
                f"host_memory_limit={format_bytes(self.limit)}: forwards that wait for their backward hold "
                f"{format_bytes(held)} of it, and this one takes {format_bytes(size)}; it has not run. "
                "Run each backward before the next forward, wrap with forwards= as many as wait at one time, "
                "or raise the limit"
            )

    def note(self, store: Store) -> None:
        """Count a store as long as it is there."""
        self._taken.add(store)


class Stores:
    """The stores of one model's steps: as many as forwards wait for their backward at one time.

    Attributes
    ----------
    number
        What graphs name them by.
    size
        Bytes of each: the most that one of the steps takes.
    room
        What they share with those of other graphs of the model.
    """

    def __init__(self, target: Target, device: str, size: int = 0, room: Room | None = None) -> None:
        self.number, self.target, self.device, self.size = next(_NUMBERS), target, device, size
        self.room = room or Room()
        self._forget()
        _EVERY.add(self)

    def _forget(self) -> None:
        """Use none of the stores that there are: after a fork they are the other process's."""
        self._free: list[tuple[Store, list[Copying]]] = []
        self._lock = threading.RLock()

    def require(self, size: int) -> None:
        """A step takes so many bytes: from now on each store has as many."""
        with self._lock:
            self.size = max(self.size, size)

    def take(self) -> Store:
        """A store that nobody uses.

        Raises
        ------
        OffloadError
            If there is no room for a further one.
        """
        with self._lock:
            known = self._free.pop() if self._free else None
        if known is not None:
            store, copies = known
            for copy in copies:  # of a step that failed half-way
                with suppress(OffloadError):
                    store.wait(copy)
            if store.size >= self.size:
                return store
            del store, known  # it is gone before there is a larger one
        self.room.require(self.size)
        store = self._new()
        self.room.note(store)
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


def _forget_all() -> None:
    for stores in list(_EVERY):
        stores._forget()


os.register_at_fork(after_in_child=_forget_all)

"""What holds the values of steps while they are away from the device, and is used again from step to step.

Each value takes the next free bytes of it when it leaves: how many, a step's sizes tell.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
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
        self._sharing = weakref.WeakSet[Stores]()
        self._lock = threading.RLock()

    def share(self, stores: Stores) -> None:
        """Let stores have their part of it; in a forked process, none of what was taken before."""
        self._lock = threading.RLock()
        self._sharing.add(stores)

    def made(self, size: int, make: Callable[[], Store]) -> Store:
        """A further store of so many bytes; what nobody uses makes room for it.

        Raises
        ------
        OffloadError
            If there is no room for it.
        """
        with self._lock:
            if not self._has(size):
                for stores in list(self._sharing):
                    stores.drop_idle()
            if not self._has(size):
                raise OffloadError(
                    f"host_memory_limit={format_bytes(self.limit or 0)}: forwards that wait for their "
                    f"backward hold {format_bytes(self._held())} of it, and this one takes "
                    f"{format_bytes(size)}; it has not run. Run each backward before the next forward, wrap "
                    "with forwards= as many as wait at one time, or raise the limit"
                )
            store = make()
            self._taken.add(store)
            return store

    def _held(self) -> int:
        return sum(store.size for store in self._taken)

    def _has(self, size: int) -> bool:
        return self.limit is None or self._held() + size <= self.limit


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
        self.forget()
        _EVERY.add(self)

    def forget(self) -> None:
        """Use none of the stores that there are: after a fork they are the other process's."""
        self._free: list[tuple[Store, list[Copying]]] = []
        self._lock = threading.RLock()
        self.room.share(self)

    def drop_idle(self) -> None:
        """Let go of what nobody uses."""
        with self._lock:
            idle, self._free = self._free, []
        for store, copies in idle:
            _settle(store, copies)

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
            _settle(store, copies)
            if store.size >= self.size:
                return store
            del store, known  # it is gone before there is a larger one
        return self.room.made(self.size, self._new)

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


def _settle(store: Store, copies: list[Copying]) -> None:
    """Wait for copies of a step that failed half-way."""
    for copy in copies:
        with suppress(OffloadError):
            store.wait(copy)


def _forget_all() -> None:
    for stores in list(_EVERY):
        stores.forget()


os.register_at_fork(after_in_child=_forget_all)

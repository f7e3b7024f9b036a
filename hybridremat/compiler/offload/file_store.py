"""One file for all that moves in a step, and the two threads that copy to and from it.

It is read and written by calls, not mapped: what fails is an error of the call, and the process holds none of
its pages. Space is set aside when it is made. It has no name, and is gone with the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Final

from torch import Tensor

from hybridremat.errors import OffloadError
from hybridremat.units import format_bytes

Copy = Callable[[int, memoryview, int], int]
"""Copies between a file and memory from a byte of the file on; how many bytes."""


class FileStore:
    """A file for the moves of a step (see :class:`~hybridremat.compiler.offload.stores.Store`)."""

    def __init__(self, folder: str, size: int) -> None:
        self.size = size
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open for long
            if size:
                os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
            helps = "Free as much, set host_memory_limit= lower, or wrap" if full else "Wrap"
            raise OffloadError(
                f'offload="file:{folder}": a file of {format_bytes(size)} cannot be made there '
                f"({error.strerror or error}); nothing has run. {helps} with another folder"
            ) from error

    def out(self, tensor: Tensor, offset: int) -> Future[None]:
        """Start to copy a tensor's whole storage to a place in the file."""
        return _start(_OUT, os.pwrite, self._file, tensor, offset)

    def back(self, tensor: Tensor, offset: int, after: Future[None]) -> Future[None]:
        """Start to copy from a place in the file, once that is written, into a tensor's whole storage."""
        self.wait(after)
        return _start(_BACK, _read_into, self._file, tensor, offset)

    def wait(self, copy: Future[None]) -> None:
        """Wait for a copy.

        Raises
        ------
        OffloadError
            If it failed.
        """
        # not raised itself: what waits would then be held by the copy, which it holds
        error = copy.exception()
        if isinstance(error, OSError):
            raise OffloadError(
                f"a value could not be copied to or from the file of offload= ({error.strerror or error}); "
                "this step is lost: drop its gradients"
            ) from error
        if error is not None:
            raise error


def _start(way: _Way, copy: Copy, file: IO[bytes], tensor: Tensor, offset: int) -> Future[None]:
    storage = tensor.untyped_storage()
    whole = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return way.submit(_copied, copy, file, memoryview(whole), offset, [tensor])


def _copied(copy: Copy, file: IO[bytes], data: memoryview, offset: int, keeps: list[Tensor]) -> None:
    """Copy all of it; the file is open and the tensor lives until then, and that not a moment longer.

    An executor drops the arguments of a job after those who wait for it have gone on: a tensor among them
    would be freed late, and in another thread.
    """
    try:
        done = 0
        while done < len(data):
            now = copy(file.fileno(), data[done:], offset + done)
            if not now:
                raise OSError("it ends too early")
            done += now
    finally:
        keeps.clear()


def _read_into(file: int, data: memoryview, offset: int) -> int:
    return os.preadv(file, [data], offset)


class _Way:
    """One thread, which makes copies of one direction in turn; after a fork a new one."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        os.register_at_fork(after_in_child=self._forget)

    def submit(self, job: Callable[..., None], *given: object) -> Future[None]:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            return self._executor.submit(job, *given)

    def _forget(self) -> None:
        self._executor, self._lock = None, threading.Lock()


_OUT: Final = _Way("hybridremat-out")
_BACK: Final = _Way("hybridremat-back")

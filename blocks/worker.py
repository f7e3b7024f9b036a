"""A process that solves blocks: pickled problems in on stdin, pickled option sets out on stdout.

Started by :mod:`hybridremat.blocks.solve` as a bare interpreter rather than through ``multiprocessing``,
which would import the caller's main script again: here a script without ``if __name__ == "__main__"`` and a
notebook work alike, and torch is never loaded. Only pickles of the two processes themselves are read.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from threading import Lock
from types import TracebackType
from typing import Final

from hybridremat.blocks.types import BlockProblem, BlockSolver, OptionSet

# The parent's sys.path comes as arguments, so that the worker finds the same package in the same place.
_START = "import sys; sys.path[:] = sys.argv[1:]; from hybridremat.blocks.worker import serve; serve()"

END_SECONDS: Final = 10.0
"""How long a killed process is waited for."""


class WorkerError(RuntimeError):
    """The worker process could not be started or died before it answered."""


def serve() -> None:
    """Answer every problem on stdin until it closes."""
    from hybridremat.blocks.curtailed import options_within

    answers = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not get between the answers.
    os.dup2(2, 1)
    while True:
        try:
            problem, solver, seconds = pickle.load(sys.stdin.buffer)  # noqa: S301 - written by the parent
        except EOFError:
            return
        reply: OptionSet | ValueError
        try:
            reply = options_within(problem, seconds, solver)
        except ValueError as error:
            reply = error
        pickle.dump(reply, answers)
        answers.flush()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, from their first instruction on; their parent ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker:
    """One worker process, started at the first problem and ended by leaving the ``with`` block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = Lock()
        self.closed = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._starting:  # no process may start, or be about to, once this worker is closed
            self.closed = True
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that the system does not let go of is left to it
                self._process.communicate(timeout=END_SECONDS)

    def solve(
        self, problem: BlockProblem, solver: BlockSolver = "auto", seconds: float = inf
    ) -> OptionSet:
        """Options of one block, in about so many seconds of a nominal core.

        Raises
        ------
        ValueError
            What :func:`enumerate_options` raised.
        WorkerError
            If the process could not be started or ended without an answer.
        """
        try:
            reply = self._exchange(problem, solver, seconds)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerError(f"block solver process failed: {error}") from error
        if isinstance(reply, ValueError):
            raise reply
        return reply

    def _exchange(
        self, problem: BlockProblem, solver: BlockSolver, seconds: float
    ) -> OptionSet | ValueError:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        pickle.dump((problem, solver, seconds), process.stdin)
        process.stdin.flush()
        reply: OptionSet | ValueError = pickle.load(process.stdout)  # noqa: S301 - our child
        return reply

    def _started(self) -> subprocess.Popen[bytes]:
        with self._starting:
            if self.closed:
                raise EOFError("this worker is closed")
            if self._process is None:
                with _interrupts_blocked():
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", _START, *sys.path],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                    )
            return self._process

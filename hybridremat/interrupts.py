"""Ctrl-C that ends a call once and soon, wherever it comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

CLEANUP = 2.0  # seconds in which a further Ctrl-C changes nothing: workers are ended, files removed
RETRY = 0.05  # seconds until an interrupt that was lost in a destructor, or came in an import, is sent again


class _Guard:
    """The handler of SIGINT, and of exceptions that are printed and forgotten, of one call."""

    def __init__(self, *, quiet: bool) -> None:
        self.came = False
        self._holds, self._held = 0, False
        self._quiet, self._last = quiet, -CLEANUP  # when one was raised
        self._depth = len(_stack(sys._getframe()))
        self._again: list[threading.Timer] = []  # what sends one again
        self._hook = sys.unraisablehook

    def enter(self) -> None:
        sys.unraisablehook = self._on_lost
        signal.signal(signal.SIGINT, self._on_signal)

    def leave(self) -> None:
        self.settle()  # a signal on its way ends here
        for timer in self._again:
            timer.join(CLEANUP)
        if signal.getsignal(signal.SIGINT) == self._on_signal:  # else the call has set another
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = self._hook

    def settle(self) -> None:
        """Let what is sent again, and what follows at once, change nothing."""
        self._last = time.monotonic()
        for timer in self._again:
            timer.cancel()

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        self.came = True
        if self._holds:
            self._held = True
        elif self._importing(frame):
            self._send_again()
        else:
            self._interrupt()

    def _importing(self, frame: FrameType | None) -> bool:
        """Whether a module is imported in the call: one that is left half done stays so in the process.

        A program that then ends (``quiet``) does not care, and may import what runs for hours.
        """
        inside = _stack(frame)[: -self._depth]
        return not self._quiet and any(each.f_code.co_filename == _IMPORT for each in inside)

    @contextmanager
    def holding(self) -> Iterator[None]:
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if self._held and not self._holds:
            self._held = False
            self._interrupt()

    def _interrupt(self) -> None:
        if time.monotonic() - self._last >= CLEANUP:
            self._last = time.monotonic()
            if self._quiet:
                warnings.simplefilter("ignore")  # autograd warns of a backward that did not end well
            raise KeyboardInterrupt

    def _on_lost(self, lost: UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            self._hook(lost)
            return
        self._last = -CLEANUP
        self._send_again()

    def _send_again(self) -> None:
        timer = threading.Timer(RETRY, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()
        self._again = [*(each for each in self._again if each.is_alive()), timer]


_IMPORT = "<frozen importlib._bootstrap>"


def _stack(frame: FrameType | None) -> list[FrameType]:
    """The frames of a call, from the innermost to the outermost."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


_current: _Guard | None = None


@contextmanager
def prompt_interrupts(*, quiet: bool = False) -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` for SIGINT, even where the first one is swallowed.

    Destructors and callbacks of weak references, of which capturing a model has many, print it and go on:
    it is sent again. So it is while a module is imported: one that is left half done stays so. Other code
    catches it, or makes another error of it: it is raised again at the next :func:`raise_if_interrupted`, for
    that error, and at the end. Does nothing outside the main thread, inside
    another guard, and where SIGINT is ignored or handled by somebody else. ``quiet``: an interrupt turns
    warnings off for good; for programs that then end.
    """
    global _current
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    guard = _current = _Guard(quiet=quiet)
    try:
        guard.enter()
        yield
    except Exception as error:
        if guard.came:
            raise KeyboardInterrupt from error
        raise
    finally:
        _current = None
        guard.leave()
    if guard.came:  # some code caught it
        raise KeyboardInterrupt


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let an interrupt of a guarded call wait for the end of what must not be left half done."""
    if _current is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    with _current.holding():
        yield


def raise_if_interrupted() -> None:
    """Raise an interrupt that came in the guarded call and was swallowed: that call still goes on."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and _current is not None and _current.came:
        _current.settle()
        raise KeyboardInterrupt

"""Ctrl-C that ends the program once, soon and quietly, wherever it comes."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

CLEANING = 2.0
"""Seconds in which a second Ctrl-C changes nothing: workers are being ended, files removed."""

AGAIN = 0.05
"""Seconds after which an interrupt that a destructor has swallowed is raised once more."""


class _Interrupts:
    """Handles SIGINT. ``came`` says whether one was meant to end the program."""

    def __init__(self) -> None:
        self.came = False
        self._last = -CLEANING
        self._other_hook: Callable[[UnraisableHookArgs], object] = sys.unraisablehook

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Raise, unless one has just been raised."""
        self.came = True
        if time.monotonic() - self._last >= CLEANING:
            self._last = time.monotonic()
            warnings.simplefilter("ignore")  # autograd warns of a backward that did not end well
            raise KeyboardInterrupt

    def on_unraisable(self, lost: UnraisableHookArgs) -> None:
        """Raise an interrupt again that came inside a destructor, where it is printed and lost."""
        if isinstance(lost.exc_value, KeyboardInterrupt) and hasattr(signal, "setitimer"):
            self._last = -CLEANING
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            self._other_hook(lost)


@contextmanager
def prompt_interrupts() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` for SIGINT, whatever becomes of the first exception.

    Destructors and callbacks of weak references, of which capturing a model has many, swallow it, and
    libraries that are being imported turn it into errors of theirs. Does nothing outside the main thread, and
    where SIGINT is handled by somebody else.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts, hook = _Interrupts(), sys.unraisablehook
    sys.unraisablehook = interrupts.on_unraisable
    signal.signal(signal.SIGINT, interrupts.on_signal)
    alarm = signal.signal(signal.SIGALRM, interrupts.on_signal) if hasattr(signal, "SIGALRM") else None
    try:
        yield
    except Exception as error:
        if interrupts.came:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
        sys.unraisablehook = hook
    if interrupts.came:
        raise KeyboardInterrupt

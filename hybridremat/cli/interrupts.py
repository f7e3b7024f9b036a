"""Ctrl-C that ends the program once, soon and quietly, wherever it comes."""

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
RETRY = 0.05  # seconds until an interrupt that was lost in a destructor is sent again


@contextmanager
def prompt_interrupts() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` for SIGINT, even where the first one is swallowed.

    Destructors and callbacks of weak references, of which capturing a model has many, print it and go on;
    libraries that are being imported turn it into errors of theirs. Does nothing outside the main thread, and
    where SIGINT is ignored or handled by somebody else.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came, last = False, -CLEANUP  # when one was raised
    again: threading.Timer | None = None

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal came, last
        came = True
        if time.monotonic() - last >= CLEANUP:
            last = time.monotonic()
            warnings.simplefilter("ignore")  # autograd warns of a backward that did not end well
            raise KeyboardInterrupt

    def send_again(lost: UnraisableHookArgs) -> None:
        nonlocal again, last
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            hook(lost)
            return
        last = -CLEANUP
        again = threading.Timer(RETRY, os.kill, (os.getpid(), signal.SIGINT))
        again.start()

    hook, sys.unraisablehook = sys.unraisablehook, send_again
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        if again is not None:
            again.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = hook
    if came:  # some code caught it
        raise KeyboardInterrupt

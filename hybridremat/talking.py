"""What the command line says beside its results: warnings and the log, on the standard error alone."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO


@contextmanager
def talking(*, verbose: bool, quiet: bool) -> Iterator[None]:
    """Warnings are one line each; ``quiet`` leaves them out, ``verbose`` adds hybridremat's log."""
    logger = logging.getLogger("hybridremat")
    level, handler = logger.level, logging.StreamHandler()
    handler.setFormatter(logging.Formatter("hybridremat: %(message)s"))
    logger.setLevel(logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("ignore")
            else:
                warnings.showwarning = _one_line
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _one_line(message: Warning | str, *_: object, **__: object) -> None:
    text = " ".join(str(message).split())
    sys.stderr.write(f"hybridremat: warning: {text}\n")


@contextmanager
def results_apart(*, active: bool) -> Iterator[None]:
    """Whatever is printed inside goes to the standard error: a user's module may print, and C code too."""
    if not active:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1) if _is_descriptor_1(sys.stdout) else None
    if kept is not None:
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False

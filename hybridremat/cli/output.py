"""What a command writes: results, its log and warnings, errors; and whether a file can be written."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

from hybridremat.errors import OutputError
from hybridremat.files import is_special


def print_json(data: object) -> None:
    """Write JSON, and nothing else, to the standard output."""
    sys.stdout.write(json.dumps(data, indent=1) + "\n")


def require_writable(text: str | None, *, option: str = "-o") -> None:
    """Refuse a path that cannot be written, before seconds of planning are spent for it.

    Raises
    ------
    OutputError
        If the folder is missing or takes no file, or ``text`` names a folder.
    """
    if text is None:
        return
    path = Path(text)
    if is_special(path):
        return
    if path.is_symlink():
        path = path.resolve()
    if path.is_dir():
        raise OutputError(f"{option} {text}: that is a folder; name a file in it")
    if not path.parent.is_dir():
        raise OutputError(f"{option} {text}: there is no folder {path.parent}; make it first (mkdir -p)")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{option} {text}: no file can be written in {path.parent} ({reason})") from error


@contextmanager
def log_to_stderr(*, verbose: bool, quiet: bool) -> Iterator[None]:
    """Write each warning as one line; ``quiet`` leaves them out, ``verbose`` adds hybridremat's log."""
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
def stdout_to_stderr(*, active: bool) -> Iterator[None]:
    """Send what is printed inside to the standard error: the user's code may print, and C code too."""
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


def print_error(error: Exception, *, verbose: bool, as_json: bool) -> None:
    """Write an error as one line, and with ``as_json`` as JSON too; with ``verbose`` after its traceback."""
    if verbose:
        traceback.print_exception(error)
    message = " ".join(_text(error).split())
    sys.stderr.write(f"hybridremat: {message}\n")
    try:
        if as_json:
            sys.stdout.write(json.dumps(_error_data(error, message), indent=1) + "\n")
        sys.stdout.flush()
    except OSError:  # a full disk, say, which may be the error itself
        discard_stdout()


def discard_stdout() -> None:
    """Drop what the standard output still holds: the interpreter could not flush it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _text(error: Exception) -> str:
    """What an error says; of the system's about a file, without its number."""
    if type(error).__module__ == "builtins" and isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _error_data(error: Exception, message: str) -> dict[str, object]:
    """The error's type, its text, and the figures that it has (``limit`` and ``least`` in bytes)."""
    figures = {name: value for name, value in vars(error).items() if isinstance(value, int | float)}
    return {"error": type(error).__name__, "message": message, **figures}

"""How the command line tells an error: one line for people, with ``--json`` an object for programs too.

As npm does: the object stands alone on the standard output, where a program that asked for JSON reads; the
line for people is on the standard error in any case.
"""

from __future__ import annotations

import json
import os
import sys
import traceback


def report_failure(error: Exception, *, verbose: bool, as_json: bool) -> None:
    """Write the error; with ``verbose`` after its traceback."""
    if verbose:
        traceback.print_exception(error)
    message = " ".join(str(error).split())
    sys.stderr.write(f"hybridremat: {message}\n")
    try:
        if as_json:
            sys.stdout.write(json.dumps(failure(error, message), indent=1) + "\n")
        sys.stdout.flush()
    except OSError:  # the error may be that nothing can be written there (a full disk)
        drop_output()


def drop_output() -> None:
    """Leave the interpreter nothing to flush at its end: what is left in the standard output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def failure(error: Exception, message: str) -> dict[str, object]:
    """Name of the error, its text, and the figures that it carries (``limit`` and ``least`` in bytes)."""
    figures = {name: value for name, value in vars(error).items() if isinstance(value, int | float)}
    return {"error": type(error).__name__, "message": message, **figures}

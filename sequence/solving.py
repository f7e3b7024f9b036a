"""CP-SAT in a thread of its own, so that Ctrl-C ends a solve at once.

While a solver runs in the main thread, Python gets no word of signals before it is through.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from hybridremat.interrupts import prompt_interrupts

if TYPE_CHECKING:  # takes a third of a second, and most plans need no search
    from ortools.sat.python.cp_model import CpModel, CpSolver

POLL_SECONDS: Final = 0.05
"""How often a wait looks for signals, where the system does not end it for them."""

STOP_SECONDS: Final = 20.0
"""How long an interrupted solve is waited for: it looks for the end in a moment, on a busy machine later."""


@prompt_interrupts()
def solved(solver: CpSolver, model: CpModel) -> Any:
    """The status of a solve, as of ``solver.solve(model)``; an exception that a signal raises ends it.

    Raises
    ------
    ValueError
        If the solver has no ``max_deterministic_time``: should a signal be lost, nothing would end it.
    """
    if not math.isfinite(solver.parameters.max_deterministic_time):
        raise ValueError("a solve needs an effort at which it ends: set max_deterministic_time")
    done = threading.Event()  # not thread.join: interrupted, Python 3.11 takes a running thread for ended
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(solver.solve(model))
        except BaseException as error:  # noqa: BLE001 - raised again, where it was asked for
            found.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="cp-sat", daemon=True)
    thread.start()
    try:
        while not done.wait(POLL_SECONDS):
            pass
    except BaseException:
        _stop(solver, done)
        raise
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _stop(solver: CpSolver, done: threading.Event) -> None:
    """End a solve, as none is to outlive its caller; asked again, for one may not have begun yet."""
    until = time.monotonic() + STOP_SECONDS
    while not done.is_set() and time.monotonic() < until:
        solver.stop_search()
        done.wait(POLL_SECONDS)

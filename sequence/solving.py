"""CP-SAT in a thread of its own, so that Ctrl-C ends a solve at once.

While a solver runs in the main thread, Python gets no word of signals before it is through.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # takes a third of a second, and most plans need no search
    from ortools.sat.python.cp_model import CpModel, CpSolver

POLL_SECONDS: Final = 0.05
"""How often a wait looks for signals, where the system does not end it for them."""


def solved(solver: CpSolver, model: CpModel) -> Any:
    """The status of a solve, as of ``solver.solve(model)``; an exception that a signal raises ends it."""
    done = threading.Event()
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
        while not done.is_set():  # no solve outlives its caller; it looks for the end in a moment
            solver.stop_search()
            done.wait(POLL_SECONDS)
        raise
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]

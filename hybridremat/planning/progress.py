"""How far planning is, as a bar on a terminal and as lines elsewhere, and how long its stages took."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from hybridremat.interrupts import prompt_interrupts, raise_if_interrupted
from hybridremat.planning.stage_weights import CAPTURE, USUAL

logger = logging.getLogger("hybridremat.progress")

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

Timings = dict[str, float]
"""Seconds by stage."""

SOON = 2.0
"""Seconds of planning in which nothing is said where there is no terminal."""


LONG = 30.0
"""Seconds of planning after which a line says what takes so long."""

HELPS = {
    CAPTURE: 'name layers that repeat as units (units="layers.*"): equal ones are captured once',
    "trying kernels": "kernels are tried once on a device, and kept (cache=True)",
    "timing kernels": 'kernels are timed once on a device, and kept; cost_model="flops" times none',
    "solving blocks": "give a time (planning_budget=20), or a higher limit",
}
"""By stage; of later ones what helps is what does in solving."""


def no_progress(_stage: str, _done: int, _total: int) -> None:
    """Show nothing."""


class Stopwatch:
    """Seconds by stage, those of earlier stages included."""

    def __init__(self, earlier: Mapping[str, float]) -> None:
        self.timings: Timings = dict(earlier)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a stage; one that is timed again adds to it."""
        started = time.perf_counter()
        yield
        self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - started


@contextmanager
def planning_progress(*, show: bool = True, first: str = CAPTURE) -> Iterator[Progress]:
    """Yield a function (stage, done, total) that shows how far planning is.

    On a terminal it moves a bar, which is removed at the end. Elsewhere (a batch job's file, a notebook) it
    says a line for each stage, unless all is over in :data:`SOON` seconds; ``first``: for the capture.
    Nothing is shown with ``show=False``, and one process of a group shows it.
    """
    with prompt_interrupts(), _shown(show=show and _first_rank(), first=first) as move:
        long = _Long(show=show)

        def prompt(stage: str, done: int, total: int) -> None:
            raise_if_interrupted()
            move(stage, done, total)
            long.move(stage)

        yield prompt


@contextmanager
def _shown(*, show: bool, first: str) -> Iterator[Progress]:
    if not show:
        yield no_progress
    elif sys.stderr.isatty():
        from hybridremat.planning.progress_bar import planning_bar  # loads rich

        with planning_bar() as move:
            yield move
    else:
        lines, finished = _Lines(first), False
        try:
            yield lines.move
            finished = True
        finally:
            lines.end(finished=finished)


def say(line: str, *, show: bool = True) -> None:
    """Say a line of progress: by ``logging`` to who asked for its level INFO, else on the error stream."""
    if not show or logger.isEnabledFor(logging.INFO):
        logger.info("%s", line)
    elif _first_rank():
        sys.stderr.write(f"hybridremat: {line}\n")


class _Lines:
    """Says the stages of one planning, each as it begins, once it has gone on for a while."""

    def __init__(self, first: str) -> None:
        self._started, self._stage, self._said = time.perf_counter(), CAPTURE, False
        self._capture = threading.Timer(SOON, self._say, [first])  # capture reports nothing meanwhile
        self._capture.daemon = True
        self._capture.start()

    def move(self, stage: str, _done: int, _total: int) -> None:
        self._capture.cancel()
        spent = time.perf_counter() - self._started
        if stage != self._stage and spent >= SOON:
            self._say(f"{stage} ({spent:.0f} s so far)")
        if spent >= SOON:
            self._stage = stage

    def end(self, *, finished: bool) -> None:
        self._capture.cancel()
        if self._said and finished and self._stage in (CAPTURE, *USUAL):  # else not planning: measuring, say
            say(f"planned in {time.perf_counter() - self._started:.0f} s")

    def _say(self, line: str) -> None:
        self._said = True
        say(line)


class _Long:
    """Says once, after :data:`LONG` seconds, which stage has taken most of them, and what would help."""

    def __init__(self, *, show: bool) -> None:
        self._show, self._said = show, False
        self._stage, self._since = CAPTURE, time.perf_counter()
        self._took: dict[str, float] = {}

    def move(self, stage: str) -> None:
        now = time.perf_counter()
        self._took[self._stage] = self._took.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now
        spent = sum(self._took.values())
        if spent < LONG or self._said:
            return
        self._said = True
        most = max(self._took, key=lambda each: self._took[each])
        if most not in (CAPTURE, *USUAL):  # no planning
            return
        helps = HELPS.get(most, HELPS["solving blocks"])
        line = f"planning has taken {spent:.0f} s so far, {self._took[most]:.0f} of them {most}: {helps}"
        say(line, show=self._show)


def _first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"

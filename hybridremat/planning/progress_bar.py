"""The bar of planning on a terminal: one over all stages, and one of capture before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich import progress as bars
from rich.console import Console

from hybridremat.planning.stage_weights import CAPTURE, USUAL, Position

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

FEW: Final = 0.1
"""The share of a planning before which nothing is said of the time that is left."""


@contextmanager
def planning_bar(console: Console | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function (stage, done, total) that moves the bar, which is removed at the end.

    What is no stage of a plan (measuring, the batches of a search) has a bar for each. ``console``: where it
    is drawn; None for the error stream.
    """
    with bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[left]}"),
        console=console or Console(stderr=True),
        transient=True,
    ) as bar:
        moved = _Moved(bar)
        yield moved
        moved.position.end()


class _Moved:
    """Moves the bar of one planning."""

    def __init__(self, bar: Bar) -> None:
        self.position, self._bar = Position(), bar
        self._task = bar.add_task(CAPTURE, total=None, left="")
        self._stage, self._began = CAPTURE, time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        new = stage != self._stage
        if new and (self._stage not in USUAL or stage not in USUAL):
            self._next_bar()
        self._stage = stage
        self.position.move(stage, done, total)
        if stage in USUAL:
            share, left = self.position.share, self._left()
            self._update(self._task, stage, share, 1.0, left, refresh=new)
        else:
            self._update(self._task, stage, done, total, f"{done}/{total}", refresh=new)

    def _next_bar(self) -> None:
        self._bar.reset(self._task)
        self._began = time.perf_counter()

    def _left(self) -> str:
        share, spent = self.position.share, time.perf_counter() - self._began
        if share < FEW or spent < 1:
            return ""
        return f"about {spent * (1 - share) / share:.0f} s left"

    def _update(
        self, task: TaskID, stage: str, done: float, total: float, left: str, *, refresh: bool
    ) -> None:
        # drawn at once when a stage begins: the next update may be far away
        self._bar.update(task, description=stage, completed=done, total=total, left=left, refresh=refresh)

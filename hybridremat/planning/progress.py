"""How far planning is, as a bar on the terminal, and how long its stages took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

Timings = dict[str, float]
"""Seconds by stage."""


def no_progress(_stage: str, _done: int, _total: int) -> None:
    """Show nothing."""


class Stopwatch:
    """Seconds by stage, those of earlier stages included."""

    def __init__(self, earlier: Mapping[str, float]) -> None:
        self.timings: Timings = dict(earlier)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a stage."""
        started = time.perf_counter()
        yield
        self.timings[stage] = time.perf_counter() - started


@contextmanager
def planning_progress(*, show: bool = True) -> Iterator[Progress]:
    """Yield a function (stage, done, total) that moves a bar, which is removed at the end.

    Nothing is drawn if the error stream is not a terminal, or with ``show=False``.
    """
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    with bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(compact=True),
        bars.TextColumn("left"),
        console=console,
        transient=True,
        disable=not (show and console.is_terminal),
    ) as bar:
        task = bar.add_task("capturing", total=None)
        shown = ""

        def move(stage: str, done: int, total: int) -> None:
            nonlocal shown
            if stage != shown:  # drawn at once, with clocks of its own: the next update may be far away
                bar.reset(task)
            bar.update(task, description=stage, completed=done, total=total, refresh=stage != shown)
            shown = stage

        yield move

"""Progress that a person can see: one bar on the terminal's error stream, gone when planning is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridremat.planning.timings import Progress


@contextmanager
def planning_progress(*, show: bool = True) -> Iterator[Progress]:
    """Yield a function (stage, done, total) that moves the bar.

    Nothing is drawn where the error stream is no terminal, or with ``show=False``.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not (show and console.is_terminal)
    ) as bar:
        task = bar.add_task("capturing", total=None)

        shown = ""

        def move(stage: str, done: int, total: int) -> None:
            nonlocal shown
            # a new stage is drawn at once: the next one may be the one that takes long
            bar.update(task, description=stage, completed=done, total=total, refresh=stage != shown)
            shown = stage

        yield move

"""How far planning is, and how long its stages took."""

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

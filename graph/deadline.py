"""When a search is to end with what it has: the clock of ``planning_budget``."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Final


class Deadline:
    """So many seconds from now on; None for as many as it takes.

    Without one, searches count what they do and never look at a clock, so that they find the same on any
    machine. With one they may find something else in every run.
    """

    def __init__(self, seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds = clock, inf if seconds is None else seconds
        self._begin = clock()

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self._seconds < inf

    @property
    def left(self) -> float:
        """Seconds left, at least zero; infinite without a deadline."""
        return max(0.0, self._begin + self._seconds - self._clock()) if self else inf

    @property
    def passed(self) -> bool:
        """Whether none are left."""
        return bool(self) and not self.left

    def share(self, part: float) -> Deadline:
        """The deadline at which a part of the time will have passed, where another stage begins."""
        earlier = Deadline(self._seconds * part if self else None, clock=self._clock)
        earlier._begin = self._begin
        return earlier


NO_DEADLINE: Final = Deadline(None)

"""How far planning is, over all its stages: what each takes, by earlier plannings of this process."""

from __future__ import annotations

import time
from typing import Final

CAPTURE: Final = "capturing"

USUAL: Final = {
    "trying kernels": 2.0,
    "timing kernels": 4.0,
    "segmenting": 0.1,
    "solving blocks": 1.5,
    "composing": 0.7,
    "improving": 1.5,
    "polishing": 6.0,
    "bounding": 0.5,
    "emitting": 1.5,
}
"""Seconds of the stages of a plan, in order, before one has been timed: about those of ResNet-50."""

_seconds: dict[str, float] = dict(USUAL)


def forget() -> None:
    """Go by the usual times again."""
    _seconds.clear()
    _seconds.update(USUAL)


class Position:
    """Where one planning is: the share of it that is done, which never falls.

    Its stages may be left out, or come again (a second search); how long each took counts for the next
    planning, of which capture is no part: nobody can say how much of it is done.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._order = list(USUAL)
        self._stage, self._since = "", time.perf_counter()
        self._took: dict[str, float] = {}

    def move(self, stage: str, done: int, total: int) -> None:
        """Note that so much of a stage is done; stages that no plan has change nothing."""
        if stage != self._stage:
            self._end_stage()
            self._stage, self._since = stage, time.perf_counter()
        if stage in self._order:
            before = sum(_seconds[each] for each in self._order[: self._order.index(stage)])
            inside = _seconds[stage] * min(1.0, done / max(1, total))
            self.share = max(self.share, (before + inside) / sum(_seconds.values()))

    def end(self) -> None:
        """Weigh the stages of the next planning by those of this one, which was finished."""
        self._end_stage()
        if self._took:  # kernels that are timed once are not timed again, and so on: half of each
            _seconds.update({each: (_seconds[each] + self._took.get(each, 0.0)) / 2 for each in USUAL})

    def _end_stage(self) -> None:
        if self._stage in USUAL:
            spent = time.perf_counter() - self._since
            self._took[self._stage] = self._took.get(self._stage, 0.0) + spent

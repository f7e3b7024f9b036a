"""The options found so far, in columns: whether one of them is as good as another is asked very often."""

from __future__ import annotations

import numpy as np

from hybridremat.blocks.types import BlockProblem, Option


class Found:
    """Options and their figures: saved bytes, higher peak, time, whether late, far outputs not left alone."""

    def __init__(self, problem: BlockProblem) -> None:
        self.options: list[Option] = []
        self._problem, self._far = problem, sorted(problem.far)
        self._figures = np.empty((64, 4 + len(self._far)), np.int64)

    def add(self, option: Option) -> None:
        """One more option."""
        count = len(self.options)
        if count == len(self._figures):
            self._figures = np.concatenate((self._figures, np.empty_like(self._figures)))
        peak = max(option.forward_peak, option.backward_peak)
        late = self._problem.is_late(option)
        self._figures[count] = (option.saved_bytes, peak, option.time, late, *self._read(option.idle))
        self.options.append(option)

    def as_good(
        self, saved: int, peak: int, time: int, idle: frozenset[int], *, late: bool = False
    ) -> Option | None:
        """The first option that needs no more of anything, leaves as much alone, and is late only if so."""
        most = np.array((saved, peak, time, late, *self._read(idle)))
        worse = (self._figures[: len(self.options)] > most).max(axis=1)
        good = np.flatnonzero(~worse)
        return self.options[good[0]] if len(good) else None

    def _read(self, idle: frozenset[int]) -> list[bool]:
        return [d not in idle for d in self._far]

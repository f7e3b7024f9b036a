"""Answers to "least time within these limits", with as few solves as possible.

Least time falls as limits grow. So what is proved at one pair of limits says much about others: an option
that fits tighter limits and is no slower than a bound proved at looser ones is optimal there too, and what is
infeasible stays infeasible when limits tighten. Only questions left open by that go to CP-SAT.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridremat.blocks.model import BlockModel
from hybridremat.blocks.optimize import Answer, minimize_time
from hybridremat.blocks.scale import scale_block
from hybridremat.blocks.types import BlockProblem, Option

Limits = tuple[int, int]
"""Most saved bytes, and most bytes at the peak of either phase."""


@dataclass
class BlockSearch:
    """One block's models, its answers so far and the options found.

    Attributes
    ----------
    tolerance
        Nanoseconds by which an option may miss the least time before it is worth a solve.
    """

    problem: BlockProblem
    solo: bool = False
    tolerance: int = 0
    effort: float = 1.0
    options: list[Option] = field(default_factory=list)
    solves: int = 0
    unproved: int = 0

    def __post_init__(self) -> None:
        self.scale = scale_block(self.problem)
        self._models: dict[int, BlockModel] = {}
        self._bounds: list[tuple[Limits, int]] = []
        self._infeasible: list[Limits] = []

    def best(self, limits: Limits) -> Option | None:
        """The fastest known option within ``limits`` (bytes)."""
        fitting = [o for o in self.options if _fits(o, limits)]
        return min(fitting, key=lambda o: (o.time, o.saved_bytes, o.backward_peak), default=None)

    def query(self, limits: Limits) -> Option | None:
        """The fastest option within ``limits``; None if there is none (or none was found in time)."""
        if any(_within(limits, known) for known in self._infeasible):
            return self.best(limits)
        best = self.best(limits)
        bound = max((time for known, time in self._bounds if _within(limits, known)), default=0)
        if best is not None and best.time <= bound + self.tolerance:
            return best
        answer = self._solve(limits, copies=2)
        if answer.option is None and best is None:
            answer = self._solve(limits, copies=3)
        if answer.infeasible:
            self._infeasible.append(limits)
        elif answer.option is not None:
            self.options.append(answer.option)
            self._bounds.append((limits, answer.bound))
        return self.best(limits)

    def _solve(self, limits: Limits, copies: int) -> Answer:
        if copies not in self._models:
            self._models[copies] = BlockModel(self.problem, self.scale, copies, solo=self.solo)
        answer = minimize_time(self._models[copies], *limits, effort=self.effort)
        self.solves += 1
        self.unproved += not answer.proved
        return answer


def _fits(option: Option, limits: Limits) -> bool:
    return option.saved_bytes <= limits[0] and max(option.forward_peak, option.backward_peak) <= limits[1]


def _within(limits: Limits, looser: Limits) -> bool:
    return limits[0] <= looser[0] and limits[1] <= looser[1]

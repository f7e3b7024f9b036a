"""Options of block problems solved before, in this process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from hybridremat.blocks.pareto import block_structure, reuse_options
from hybridremat.blocks.solve import solve_blocks
from hybridremat.blocks.types import BlockProblem, OptionSet


class OptionCache:
    """Options of block problems solved before, in this process."""

    def __init__(self) -> None:
        self._known: dict[BlockProblem, OptionSet] = {}
        self._alike: dict[Hashable, BlockProblem] = {}

    def solve(
        self, problems: Sequence[BlockProblem], workers: int | None, on_progress: Callable[[int, int], None]
    ) -> dict[BlockProblem, OptionSet]:
        """Options of each problem; only those not known are solved."""
        missing = [problem for problem in dict.fromkeys(problems) if problem not in self._known]
        if missing:
            self._known.update(solve_blocks(missing, workers=workers, on_progress=on_progress))
            self._alike.update((block_structure(problem), problem) for problem in missing)
        return {problem: self._known[problem] for problem in problems}

    def reused(self, problems: Iterable[BlockProblem]) -> dict[BlockProblem, OptionSet]:
        """Options of those problems that are not known, from others that differ in sizes alone."""
        found = {}
        for problem in dict.fromkeys(problems):
            alike = self._alike.get(block_structure(problem))
            if problem not in self._known and alike is not None:
                found[problem] = reuse_options(problem, self._known[alike])
        return found


OPTIONS = OptionCache()
"""Of this process."""

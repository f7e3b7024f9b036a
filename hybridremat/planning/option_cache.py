"""Options of block problems that this process, or one before it, has solved."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy

from hybridremat.blocks.pareto import block_structure, reuse_options
from hybridremat.blocks.solve import solve_blocks
from hybridremat.blocks.types import BlockProblem, BlockSolver, OptionSet
from hybridremat.planning.kept_options import KeptOptions


class OptionCache:
    """Options by block problem, and by structure (all but sizes)."""

    def __init__(self) -> None:
        self._kept: KeptOptions | None = None
        self._known: dict[tuple[BlockProblem, BlockSolver], OptionSet] = {}
        self._by_structure: dict[Hashable, BlockProblem] = {}

    def kept_in(self, kept: KeptOptions | None) -> OptionCache:
        """The same options, and those on disk, where new ones are kept, too."""
        other = copy(self)
        other._kept = kept
        return other

    def solve(
        self,
        problems: Sequence[BlockProblem],
        workers: int | None,
        on_progress: Callable[[int, int], None],
        solver: BlockSolver = "auto",
    ) -> dict[BlockProblem, OptionSet]:
        """Options of each problem; only new ones are solved."""
        known = self._known
        missing = [problem for problem in dict.fromkeys(problems) if (problem, solver) not in known]
        found = self._read(missing, solver)
        if unsolved := [problem for problem in missing if problem not in found]:
            solved = solve_blocks(unsolved, workers=workers, solver=solver, on_progress=on_progress)
            found.update(solved)
            if self._kept is not None:
                for problem, options in solved.items():
                    self._kept.write(problem, solver, options)
        known.update({(problem, solver): options for problem, options in found.items()})
        self._by_structure.update(((block_structure(problem), solver), problem) for problem in missing)
        return {problem: known[problem, solver] for problem in problems}

    def _read(self, problems: Sequence[BlockProblem], solver: BlockSolver) -> dict[BlockProblem, OptionSet]:
        """What is kept on disk of some blocks."""
        if self._kept is None:
            return {}
        read = {problem: self._kept.read(problem, solver) for problem in problems}
        return {problem: options for problem, options in read.items() if options is not None}

    def reused(
        self, problems: Iterable[BlockProblem], solver: BlockSolver = "auto"
    ) -> dict[BlockProblem, OptionSet]:
        """Options of new problems, taken from solved ones that differ in sizes alone."""
        found = {}
        for problem in dict.fromkeys(problems):
            solved = self._by_structure.get((block_structure(problem), solver))
            if (problem, solver) not in self._known and solved is not None:
                found[problem] = reuse_options(problem, self._known[solved, solver])
        return found


OPTIONS = OptionCache()

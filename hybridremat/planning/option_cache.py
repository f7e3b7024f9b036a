"""Options of block problems that this process, or one before it, has solved.

They are kept on disk, so that another limit, another depth or a later run solves no block again: they depend
on nothing but the block's canonical form and the code that solves it, OR-Tools among it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import MappingProxyType

import hybridremat.blocks
from hybridremat.blocks.pareto import DEFAULT_EFFORT, block_structure, reuse_options
from hybridremat.blocks.quick_options import quick_options
from hybridremat.blocks.solve import solve_blocks
from hybridremat.blocks.types import BlockProblem, BlockSolver, OptionSet
from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.planning.disk_cache import DiskCache, Kind, cache_key
from hybridremat.planning.settings import Settings
from hybridremat.plans.codec import options_from_dict, options_to_dict

OPTION_SETS: Kind[OptionSet] = Kind("options", "the options of a block", options_to_dict, options_from_dict)


def options_on_disk(settings: Settings) -> DiskCache[OptionSet] | None:
    """The user's options of blocks; None if the cache is off."""
    return DiskCache.of_user(OPTION_SETS) if settings.cache else None


def options_key(problem: BlockProblem, solver: BlockSolver) -> str:
    """The key of a block's options: a hash of all that they depend on."""
    return cache_key(json.dumps(asdict(problem), default=sorted), solver, asdict(DEFAULT_EFFORT), _code())


@cache
def _code() -> str:
    """A hash of the code that solves blocks."""
    files = sorted(Path(hybridremat.blocks.__path__[0]).glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class OptionCache:
    """Options by block problem, and by structure (all but sizes)."""

    def __init__(self) -> None:
        self._disk: DiskCache[OptionSet] | None = None
        self._known: dict[tuple[BlockProblem, BlockSolver], OptionSet] = {}
        self._by_structure: dict[Hashable, BlockProblem] = {}

    def with_disk(self, disk: DiskCache[OptionSet] | None) -> OptionCache:
        """The same options, and those on disk, where new ones are kept, too."""
        other = copy(self)
        other._disk = disk
        return other

    def solve(
        self,
        problems: Sequence[BlockProblem],
        workers: int | None,
        on_progress: Callable[[int, int], None],
        solver: BlockSolver = "auto",
        deadline: Deadline = NO_DEADLINE,
        seconds: Mapping[BlockProblem, float] = MappingProxyType({}),
    ) -> dict[BlockProblem, OptionSet]:
        """Options of each problem; only new ones are solved.

        Those that are not solved by the deadline have some quick ones. These are not kept, and neither are
        those of blocks that may take only some ``seconds`` of a nominal core.
        """
        known = self._known
        missing = [problem for problem in dict.fromkeys(problems) if (problem, solver) not in known]
        found = self._read(missing, solver)
        curtailed: dict[BlockProblem, OptionSet] = {}
        if unsolved := [problem for problem in missing if problem not in found]:
            solved = _solved(unsolved, workers, on_progress, solver, deadline, seconds)
            curtailed = {problem: solved.pop(problem) for problem in seconds if problem in solved}
            found.update(solved)
            if self._disk is not None:
                for problem, options in solved.items():
                    self._disk.write(options_key(problem, solver), options)
        known.update({(problem, solver): options for problem, options in found.items()})
        self._by_structure.update(((block_structure(problem), solver), problem) for problem in found)
        rest = (problem for problem in missing if problem not in found and problem not in curtailed)
        quick = curtailed | {problem: quick_options(problem) for problem in rest}
        return {problem: quick.get(problem) or known[problem, solver] for problem in problems}

    def _read(self, problems: Sequence[BlockProblem], solver: BlockSolver) -> dict[BlockProblem, OptionSet]:
        """What is kept on disk of some blocks."""
        if self._disk is None:
            return {}
        read = {problem: self._disk.read(options_key(problem, solver)) for problem in problems}
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


def _solved(
    problems: Sequence[BlockProblem],
    workers: int | None,
    on_progress: Callable[[int, int], None],
    solver: BlockSolver,
    deadline: Deadline,
    seconds: Mapping[BlockProblem, float],
) -> dict[BlockProblem, OptionSet]:
    """Options of new problems; by the deadline, or at all where there are no quick ones."""
    found = solve_blocks(
        problems, workers=workers, solver=solver, on_progress=on_progress, deadline=deadline, seconds=seconds
    )
    needed = [each for each in problems if each not in found and quick_options(each) is None]
    return found | (solve_blocks(needed, workers=workers, solver=solver) if needed else {})


OPTIONS = OptionCache()

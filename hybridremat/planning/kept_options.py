"""Options of blocks on disk, so that another limit, another depth or a later run solves no block again.

A block's options depend on nothing but its canonical form and the code that solves it, OR-Tools among it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import hybridremat.blocks
from hybridremat.blocks.pareto import DEFAULT_EFFORT
from hybridremat.blocks.types import BlockProblem, BlockSolver, OptionSet
from hybridremat.files import cache_folder
from hybridremat.planning.kept_files import KeptFiles, cache_size
from hybridremat.planning.settings import Settings
from hybridremat.plans.codec import UNREADABLE, options_from_dict, options_to_dict
from hybridremat.version import __version__, solver_version


@dataclass(frozen=True)
class KeptOptions:
    """The options in one folder of the cache."""

    files: KeptFiles

    @classmethod
    def for_settings(cls, settings: Settings) -> KeptOptions | None:
        """The user's cache; None if it is off."""
        most = cache_size()
        if not settings.cache or not most:
            return None
        return cls(KeptFiles(cache_folder() / "options", most, "the options of a block"))

    def read(self, problem: BlockProblem, solver: BlockSolver) -> OptionSet | None:
        """The options of a block, if they are kept."""
        key = options_key(problem, solver)
        content = self.files.read(key)
        if content is None:
            return None
        try:
            return options_from_dict(json.loads(content))
        except UNREADABLE as error:
            self.files.refuse(key, error)
            return None

    def write(self, problem: BlockProblem, solver: BlockSolver, options: OptionSet) -> None:
        """Keep the options of a block."""
        self.files.write(options_key(problem, solver), json.dumps(options_to_dict(options)).encode())


def options_key(problem: BlockProblem, solver: BlockSolver) -> str:
    """The key of a block's options: a hash of all that they depend on."""
    described = json.dumps(asdict(problem), default=sorted)
    parts = described, solver, asdict(DEFAULT_EFFORT), __version__, solver_version(), _code()
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """A hash of the code that solves blocks."""
    files = sorted(Path(hybridremat.blocks.__path__[0]).glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

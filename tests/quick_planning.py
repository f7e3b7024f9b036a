"""Planning with little effort, for tests that ask whether plans are right, not how good they are."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from hybridremat.blocks.pareto import enumerate_options
from hybridremat.blocks.types import Effort
from hybridremat.planning import session
from hybridremat.planning.option_cache import OptionCache

LITTLE = Effort(
    solves=14, solo_solves=4, deterministic_time=0.05, family_time=0.25, limits=12, least_limits=12
)


class QuickOptions(OptionCache):
    """A coarse Pareto set of each block, found in this process."""

    def solve(self, problems, workers, on_progress):
        for problem in problems:
            if problem not in self._known:
                self._known[problem] = enumerate_options(problem, LITTLE)
        return {problem: self._known[problem] for problem in problems}


QUICK = QuickOptions()


@contextmanager
def quick_planning():
    """Sessions made inside plan coarsely."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "OPTIONS", QUICK)
        yield

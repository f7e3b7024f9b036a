"""How hard blocks are solved in tests.

Most tests ask whether plans are right, not how good they are, so they all plan with little effort. One that
looks at the quality of plans, or at the solver itself, says so: ``pytest.mark.full_effort``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from hybridremat.blocks import pareto
from hybridremat.blocks.pareto import DEFAULT_EFFORT, enumerate_options
from hybridremat.blocks.types import Effort
from hybridremat.planning import pipeline
from hybridremat.planning.option_cache import OptionCache
from hybridremat.sequence.polish import search

LITTLE = Effort(
    solves=14, solo_solves=4, deterministic_time=0.05, family_time=0.25, limits=12, least_limits=12
)
POLISH = search.EFFORT
QUICK, FULL = OptionCache(), OptionCache()


@contextmanager
def _planning(effort: Effort, options: OptionCache, polish: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "EFFORT", polish)
        patch.setattr(pareto, "enumerate_options", partial(enumerate_options, effort=effort))
        patch.setattr(pipeline, "OPTIONS", options)
        yield


def quick_planning():
    """Blocks that are solved inside, by one worker, have a coarse Pareto set; plans are not polished."""
    return _planning(LITTLE, QUICK, 0.0)


def full_planning():
    """Blocks that are solved inside have the Pareto set that users get, and plans are polished as theirs."""
    return _planning(DEFAULT_EFFORT, FULL, POLISH)

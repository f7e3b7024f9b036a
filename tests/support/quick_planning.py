"""How hard blocks are solved in tests.

Most tests ask whether plans are right, not how good they are, so they all plan with little effort. One that
looks at the quality of plans, or at the solver itself, says so: ``pytest.mark.full_effort``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from hybridremat.blocks import pareto
from hybridremat.blocks.pareto import DEFAULT_EFFORT, enumerate_options
from hybridremat.blocks.types import Effort
from hybridremat.graph.joint import Schedule
from hybridremat.planning import planner
from hybridremat.planning.option_cache import OptionCache
from hybridremat.sequence import effort
from hybridremat.sequence.exchange import improve
from hybridremat.sequence.polish import search

LITTLE = Effort(
    solves=14, solo_solves=4, deterministic_time=0.05, family_time=0.25, limits=12, least_limits=12
)
FEW, VERY_FEW = 150, 30
"""Schedules that exchanges simulate for a plan, and at one point of many."""

POLISH, CAPTURE = search.LOOKS, effort.CAPTURE
THOROUGH, QUICKLY = improve.simulations_for, improve.QUICK
QUICK, FULL = OptionCache(), OptionCache()


@contextmanager
def _planning(
    blocks: Effort,
    options: OptionCache,
    polish: tuple[search.Look, ...],
    capture: float,
    thorough: Callable[[Schedule], int],
    quickly: int,
) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(improve, "simulations_for", thorough)
        patch.setattr(improve, "QUICK", quickly)
        patch.setattr(search, "LOOKS", polish)
        patch.setattr(effort, "CAPTURE", capture)
        patch.setattr(pareto, "enumerate_options", partial(enumerate_options, effort=blocks))
        patch.setattr(planner, "OPTIONS", options)
        yield


def quick_planning():
    """Blocks that are solved inside, by one worker, have a coarse Pareto set; few exchanges, no polishing.

    That is little work as it is: what a plan can win back bounds nothing.
    """
    return _planning(LITTLE, QUICK, (), 1e6, lambda _: FEW, VERY_FEW)


def exchanging_planning():
    """As quick planning, with as many exchanges as users get: a plan and its frontier agree nearly."""
    return _planning(LITTLE, QUICK, (), 1e6, THOROUGH, QUICKLY)


def full_planning():
    """Blocks that are solved inside have the Pareto set that users get, and plans are polished as theirs."""
    return _planning(DEFAULT_EFFORT, FULL, POLISH, CAPTURE, THOROUGH, QUICKLY)

"""Which candidate a limit leads to, and that what improves it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridremat.errors import InfeasibleLimitError
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.pipeline import plan_graph
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.outside_memory import NO_OUTSIDE_MEMORY
from support.nets import transformer


def test_what_polishing_gains_counts_before_a_limit_and_an_overhead_are_refused(monkeypatch):
    found = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    best, limit = found.candidates[-1], found.candidates[-1].point.peak - 1
    assert found.choose(limit, None).point.time > best.point.time
    with pytest.raises(InfeasibleLimitError, match="no plan keeps both"):
        found.choose(limit, found.fastest_overhead)
    monkeypatch.setattr(StepFrontier, "polished", lambda *_: best)
    assert found.choose(limit, found.fastest_overhead) is best


def test_a_plan_is_never_slower_than_the_one_of_least_memory(monkeypatch):
    """Which was improved as well, and may have gained more."""
    found = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    least = found.least(NO_OUTSIDE_MEMORY)
    fast = replace(least, point=replace(least.point, time=1))
    monkeypatch.setattr(StepFrontier, "least", lambda *_: fast)
    assert found.choose(found.plain.peak - 1, None) is fast

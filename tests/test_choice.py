"""Which candidate a limit leads to, and that what improves it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridremat.errors import InfeasibleLimitError
from hybridremat.planning import step_frontier
from hybridremat.planning.improvement import Improvement
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.planner import plan_graph
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
    """Which was improved as well, and may have gained more; where it cannot, it is not looked for."""
    found = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    least = found.least(NO_OUTSIDE_MEMORY)
    fast, asked = replace(least, point=replace(least.point, time=1)), []
    monkeypatch.setattr(StepFrontier, "least", lambda *_: asked.append(1) or fast)
    assert found.choose(found.least_needs(NO_OUTSIDE_MEMORY) + 1, None) is fast and asked
    asked.clear()
    monkeypatch.setattr(step_frontier, "CLEARLY", 1.0)
    assert found.choose(found.plain.peak - 1, None) is not fast and not asked


def test_the_least_that_is_reported_is_what_its_plan_needs(monkeypatch):
    """Even where a thorough search finds a plan that needs less."""
    found = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    quick = found.least(NO_OUTSIDE_MEMORY)
    needs = found.least_needs(NO_OUTSIDE_MEMORY)
    assert found.needs(quick, NO_OUTSIDE_MEMORY) == needs
    smaller = replace(quick, point=replace(quick.point, peak=needs - 1, needs=needs - 1, time=1))
    monkeypatch.setattr(Improvement, "under", lambda *_: smaller)
    assert found.needs(found.least(NO_OUTSIDE_MEMORY), NO_OUTSIDE_MEMORY) == needs

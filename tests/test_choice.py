"""Which candidate a limit leads to, and that what improves it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridremat.errors import InfeasibleLimitError
from hybridremat.planning import step_frontier
from hybridremat.planning.choose import plan_of_point
from hybridremat.planning.improvement import Improvement
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.planner import plan_graph
from hybridremat.planning.step_frontier import StepFrontier
from support.nets import transformer


def test_what_polishing_gains_counts_before_a_limit_and_an_overhead_are_refused(monkeypatch):
    found = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    best, limit = found.candidates[-1], found.candidates[-1].peak - 1
    assert found.choose(limit, None).time > best.time
    with pytest.raises(InfeasibleLimitError, match="no plan keeps both"):
        found.choose(limit, found.fastest_overhead)
    monkeypatch.setattr(StepFrontier, "polished", lambda *_: best)
    assert found.choose(limit, found.fastest_overhead) is best


def test_a_plan_is_never_slower_than_the_one_of_least_memory(monkeypatch):
    """Which was improved as well, and may have gained more; where it cannot, it is not looked for."""
    found = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    least = found.least()
    fast, asked = replace(least, time=1), []
    monkeypatch.setattr(StepFrontier, "least", lambda *_: asked.append(1) or fast)
    needs = found.least_composed_needs
    assert found.choose(needs + 1, None) is fast and asked
    asked.clear()
    assert found.choose(int(step_frontier.AROUND_LEAST * needs) + 1, None) is not fast and not asked


def test_what_is_below_the_blocks_least_is_feasible_if_a_search_reaches_it(monkeypatch):
    """And no plan says that the least is more than it needs itself."""
    found = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    composed = found.least_composed_needs
    least = found.least()
    assert least.needs <= composed
    smaller = replace(least, peak=composed - 9, needs=composed - 9)
    monkeypatch.setattr(Improvement, "under", lambda *_: smaller)
    monkeypatch.setattr(Improvement, "polished", lambda _, candidate, *__: candidate)
    assert found.choose(composed - 9, None) is smaller
    with pytest.raises(InfeasibleLimitError, match=f"{composed - 9} bytes"):
        found.choose(composed - 10, None)

    def reported(chosen):
        how = {"limit": None, "asked": None, "cost_model": "flops"}
        return plan_of_point(found, chosen, **how).least_peak

    assert reported(smaller) == composed - 9 and reported(found.candidates[-1]) == composed

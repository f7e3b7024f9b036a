"""Which point a limit leads to, and that what a search finds counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridremat.errors import InfeasibleLimitError
from hybridremat.planning import step_frontier
from hybridremat.planning.choose import plan_of_point
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.planner import plan_graph
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.sequence.outside_memory import PhasePeaks
from hybridremat.sequence.search import Level
from support.nets import transformer


def finds(point, least=Level.QUICK):
    """A search that finds one point, at some level and above."""
    return lambda judge, pool, goal: (
        pool.with_points([point] if goal.level >= least and point.needs <= goal.limit else [])
    )


def test_what_a_search_gains_counts_before_a_limit_and_an_overhead_are_refused():
    found = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    best, limit = found.candidates[-1], found.candidates[-1].peak - 1
    assert found.choose(limit, None).time > best.time
    with pytest.raises(InfeasibleLimitError, match="no plan keeps both"):
        found.choose(limit, found.fastest_overhead)
    smaller = replace(best, needs=limit)
    searched = replace(found, searches=(*found.searches, finds(smaller, Level.FULL)))
    assert searched.choose(limit, found.fastest_overhead) == smaller


@pytest.mark.everyday
def test_a_plan_is_never_slower_than_the_one_of_least_memory(monkeypatch):
    """Which was improved as well, and may have gained more; where it cannot, it is not looked for."""
    found = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    least = found.least()
    fast, asked = replace(least, time=1), []
    monkeypatch.setattr(StepFrontier, "least", lambda *_: asked.append(1) or fast)
    needs = found.least_composed.needs
    assert found.choose(needs + 1, None) is fast and asked
    asked.clear()
    assert found.choose(int(step_frontier.AROUND_LEAST * needs) + 1, None) is not fast and not asked


def test_what_is_below_the_blocks_least_is_feasible_if_a_search_reaches_it():
    """And no plan says that the least is more than it needs itself."""
    found = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    composed, least = found.least_composed.needs, found.least()
    assert least.needs <= composed
    smaller = replace(least, phases=PhasePeaks(composed - 9, 0, 0), needs=composed - 9, time=least.time - 1)
    found = replace(found, searches=(finds(smaller, Level.THOROUGH),))
    assert found.least() == smaller == found.choose(composed - 9, None)
    with pytest.raises(InfeasibleLimitError, match=f"{composed - 9} bytes"):
        found.choose(composed - 10, None)

    def reported(chosen):
        how = {"limit": None, "asked": None, "cost_model": "flops"}
        return plan_of_point(found, chosen, **how).least_peak

    assert reported(smaller) == composed - 9 and reported(found.candidates[-1]) == composed

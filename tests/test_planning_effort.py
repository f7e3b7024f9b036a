"""How much is looked at for one plan: counts that no machine changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.planning.improvement import higher_limits
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.pipeline import plan_graph
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.outside_memory import NO_OUTSIDE_MEMORY
from hybridremat.sequence import frontier
from support.nets import transformer


def uneven(layers):
    """Layers that take different times, so that many sets of recomputations are worth it at some limit."""
    graph = transformer(layers)
    ops = (replace(op, time=op.time + 7 * op.id % 31) for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def test_a_plan_for_one_limit_looks_at_few_schedules_and_is_the_same(monkeypatch):
    """Near the limit and near the least; the whole frontier is for whoever asks for it."""
    simulated = frontier.schedule_point
    graph, options, looked = uneven(10), OptionCache(), []

    def counted(*args, **how):
        looked.append(args)
        return simulated(*args, **how)

    monkeypatch.setattr(frontier, "schedule_point", counted)

    def planned(limit, **how):
        looked.clear()
        found = plan_graph(graph, cache=options, workers=1, **how)
        chosen = found.choose(limit, None).point
        least = found.least(NO_OUTSIDE_MEMORY).point.peak
        return (chosen.peak, chosen.time, least), len(looked)

    plain = step_memory(graph, plain_schedule(graph)).peak
    limit = int(0.8 * plain)
    everywhere, all_ = planned(limit)
    near, few = planned(limit, around=(limit, *higher_limits(limit, plain)))
    assert near == everywhere and few < 0.85 * all_


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

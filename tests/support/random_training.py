"""Models put together at random, trained plain and under three limits."""

from __future__ import annotations

import copy

from hypothesis import HealthCheck, assume

import hybridremat
from support.examples import examples
from support.quick_planning import quick_planning
from support.random_models import Recipe, build
from support.training import Trained, train, train_plain

HOW = {"cost_model": "flops", "workers": 1, "progress": False}
FEW = examples(6, least=2, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)


def trained_plain(model, batch, steps: int) -> Trained:
    """Plain training; leaves an example out that plain training refuses."""
    try:
        return train_plain(model, batch, steps=steps)
    except RuntimeError:  # it changes in place what its own backward needs, or nothing in it learns
        assume(False)
        raise


def hold_to_plain(recipe: Recipe, steps: int) -> float:
    """Train plain, and planned at an easy, a middle and the least limit; the least as a share of plain."""
    model, batch = build(recipe)
    expected = trained_plain(model, batch, steps)
    with quick_planning():
        planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit="100%", **HOW)
        plan = hybridremat.get_plan(planned)
        least, plain = plan.least_peak, plan.plain_peak
        for limit in dict.fromkeys((plain, (least + plain) // 2, least)):
            if limit != plain:
                planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=limit, **HOW)
            trained = train(planned, batch, steps=steps)
            assert expected.differences(trained) == [], limit
            assert max(trained.peaks) <= limit, (trained.peaks, limit)
    return least / plain

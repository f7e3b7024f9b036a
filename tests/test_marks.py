"""The frontier of real models against recorded ones: extra flops at a share of plain eager peak.

The records were made with one thread, as all tests run: temporaries of convolutions depend on it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hybridremat
from hybridremat.zoo.models import reference_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from marks import Mark, compare, extra_at, per_layer_checkpoint, recorded_frontier


@pytest.mark.full_effort
@pytest.mark.parametrize("name", ["gpt2", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_frontier_reaches_the_recorded_one(name: str) -> None:
    model, batch = reference_model(name)
    eager, recorded = recorded_frontier(name)
    curve = hybridremat.frontier(model, kwargs=batch, cost_model="flops", progress=False)
    points = [Mark(100 * p.peak / eager, 100 * p.extra_flops) for p in curve.points]
    result = compare(points, recorded)
    assert result.worst <= 1.0, f"{result.worst:.2f} points of extra flops above the record at {result.at} %"
    assert result.least <= result.recorded_least + 1.0
    for mark in per_layer_checkpoint(name):
        extra = extra_at(points, mark.peak)
        assert extra is not None and extra < mark.extra


def test_compare_finds_what_is_worse() -> None:
    recorded = [Mark(20, 30.0), Mark(40, 10.0), Mark(60, 0.0)]
    worse = compare([Mark(21, 30.0), Mark(40, 12.5), Mark(60, 0.0)], recorded)
    assert (worse.worst, worse.at) == (2.5, 40)
    assert worse.least - worse.recorded_least == 1

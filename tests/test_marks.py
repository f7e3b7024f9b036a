"""The frontier of real models against recorded ones: extra flops at a share of plain eager peak.

The records were made with one thread, as all tests run: temporaries of convolutions depend on it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybridremat
from hybridremat.zoo.models import reference_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from compiled import Stock, stock_points, unbeaten
from marks import Mark, compare, extra_at, per_layer_checkpoint, recorded_frontier, recorded_models


def gaps(curve: hybridremat.Frontier) -> Iterator[tuple[float, float]]:
    """Limits, as shares of the plain peak, to the least and a tenth more; the proven gaps under them."""
    least = 1.1 * curve.least.peak / curve.plain_peak
    for limit in (*(share for share in (0.7, 0.4) if share > least), least):
        found = curve.plan(memory_limit=int(limit * curve.plain_peak)).certified().optimality_gap
        assert found is not None
        yield limit, found


# `make marks` looks at all of them; these are much like GPT-2 with dropout.
ALIKE = {"gpt2", "llama", "bert", "vit"}


@pytest.mark.slow
@pytest.mark.full_effort
@pytest.mark.parametrize("name", [name for name in recorded_models() if name not in ALIKE])
def test_frontier_reaches_the_recorded_one(name: str) -> None:
    base, _, dropout = name.partition("_")
    model, batch = reference_model(base, float(dropout or 0))
    eager, recorded = recorded_frontier(name)
    curve = hybridremat.frontier(model, kwargs=batch, cost_model="flops", progress=False)
    points = [Mark(100 * p.peak / eager, 100 * p.extra_flops) for p in curve.points]
    result = compare(points, recorded)
    assert result.worst <= 1.0, f"{result.worst:.2f} points of extra flops above the record at {result.at} %"
    assert result.least <= result.recorded_least + 1.0
    for mark in per_layer_checkpoint(name):
        extra = extra_at(points, mark.peak)
        assert extra is not None and extra < mark.extra
    for limit, gap in gaps(curve):
        allowed = 0.03 if limit >= 0.4 else 0.06
        assert 0 <= gap <= allowed, f"{100 * gap:.1f} % may be lost at {100 * limit:.0f} % of the plain peak"


@pytest.mark.slow
def test_a_chunked_loss_takes_no_more_than_inductors_chunks() -> None:
    """Llama's step with ``auto_chunker``: 50.9 % of eager at no extra flops."""
    model, batch = reference_model("llama")
    eager, _ = recorded_frontier("llama")
    how = {"cost_model": "flops", "outputs": "loss", "rewrites": "chunked", "progress": False}
    curve = hybridremat.frontier(model, kwargs=batch, **how)  # type: ignore[arg-type]
    assert min(point.peak for point in curve.points if point.extra_flops == 0) < 0.509 * eager


def test_compare_finds_what_is_worse() -> None:
    recorded = [Mark(20, 30.0), Mark(40, 10.0), Mark(60, 0.0)]
    worse = compare([Mark(21, 30.0), Mark(40, 12.5), Mark(60, 0.0)], recorded)
    assert (worse.worst, worse.at) == (2.5, 40)
    assert worse.least - worse.recorded_least == 1


def test_plans_are_held_against_the_stock_steps_that_no_other_beats() -> None:
    stock = (Stock("a", "1.0", 60, 3.0), Stock("b", "0.5", 55, 12.0), Stock("c", "0.1", 55, 13.0))
    alike, beyond = Stock("e", "0.5", 55, 12.0), Stock("d", "0", 40, 20.0)
    assert [each.method for each in unbeaten((*stock, alike, beyond))] == ["a", "b", "d"]


def test_the_recorded_stock_steps_can_be_read() -> None:
    points = stock_points("gpt2")
    assert Stock("budget", "1.0", 155365404, 0.0) in points
    assert min(point.extra for point in points) == 0

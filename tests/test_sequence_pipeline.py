"""Pipelines without torch: cuts against all cuts, layers against all their ways, a stage's bytes by hand."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.sequence.outside_memory import PhasePeaks
from hybridremat.sequence.pipeline.cuts import best_cuts, pareto_cuts
from hybridremat.sequence.pipeline.layer_ways import LayerWay, least_needed, least_time, on_hull, stage_ways
from hybridremat.sequence.pipeline.orders import PipelineShape
from hybridremat.sequence.pipeline.replay import StageTimes, replay
from hybridremat.sequence.pipeline.stage_bytes import StageBytes

SHAPES = [("1f1b", 4, 8, 1), ("gpipe", 4, 8, 1), ("interleaved1f1b", 2, 4, 2), ("interleaved1f1b", 4, 8, 3)]


@given(
    st.integers(1, 4).flatmap(
        lambda stages: st.tuples(
            st.just(stages),
            st.integers(stages, 8),
            st.integers(0, 20),
            st.lists(st.one_of(st.none(), st.integers(1, 30)), min_size=4 * 9 * 9, max_size=4 * 9 * 9),
        )
    )
)
def test_cuts_are_the_best_of_all(drawn):
    stages, layers, weight, numbers = drawn

    def time(stage, first, last):
        return numbers[(stage * 9 + first) * 9 + last]

    every = []
    for inner in combinations(range(1, layers), stages - 1):
        at = (0, *inner, layers)
        taken = [time(q, at[q], at[q + 1]) for q in range(stages)]
        if None not in taken:
            every.append((sum(taken), max(taken)))
    best = best_cuts(layers, stages, time, weight)
    assert (best is None) == (not every)
    if best is not None:
        assert best.cost(weight) == min(total + weight * slowest for total, slowest in every)
        found = {(each.total, each.slowest) for each in pareto_cuts(layers, stages, time)}
        unbeaten = {a for a in every if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in every)}
        assert found == unbeaten


def test_more_stages_than_layers_have_no_cuts():
    assert best_cuts(2, 3, lambda *_: 1, 5) is None


def test_equal_stages_take_what_the_formula_says():
    for schedule, devices, microbatches, per_device in SHAPES:
        shape = PipelineShape(schedule, devices, microbatches, per_device)
        taken = replay(shape.orders(), [StageTimes(10, 20)] * shape.stages)
        expected = 30 * (shape.stages + shape.max_weight) // per_device
        assert taken.time == expected
        assert taken.bubble == pytest.approx((devices - 1) / (per_device * microbatches + devices - 1))


def test_orders_that_wait_for_each_other_are_refused():
    order = PipelineShape("gpipe", 2, 1).orders()
    with pytest.raises(ValueError, match="wait for each other"):
        replay([order[0][::-1], order[1]], [StageTimes(1, 1)] * 2)


WAYS = st.lists(
    st.builds(LayerWay, st.integers(0, 20), st.integers(0, 10), st.integers(1, 20)), min_size=1, max_size=4
)


@given(st.lists(WAYS, min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 20), st.integers(0, 300))
def test_a_stage_of_layers_is_near_the_best_of_all_ways(layers, copies, gradients, limit):
    """What is said to fit does; where peaks are nothing, with one step of each hull less no more is lost."""
    hulls = [on_hull(ways) for ways in layers]
    ways = stage_ways(hulls)
    found = least_time(ways, copies, gradients, limit)
    every = [
        (sum(each.held for each in one), max(each.above for each in one), sum(each.time for each in one))
        for one in product(*layers)
    ]
    fits = [
        time
        for held, above, time in every
        if max(copies * held + above, (copies - 1) * held + gradients) <= limit
    ]
    assert found is None or found >= min(fits)
    if all(way.above == 0 for one in layers for way in one) and fits:
        step = max((b.time - a.time for hull in hulls for a, b in pairwise(hull)), default=0)
        assert found is not None
        assert found <= min(fits) + step
    assert (found is None) == (least_needed(ways, copies, gradients) > limit)


def test_bytes_of_a_stage_by_hand():
    stage = StageBytes(parameters=100, trained=80, received=3, sent=5, given=7, returned=2, loss_held=11)
    one = PipelineShape("1f1b", 2, 4)
    # parameters, two slots, 4 + 1 of what is received, 4 of what is sent and given, 2 outputs more, one loss
    assert stage.resident(one, 2, 2) == 100 + 160 + 5 * 3 + 4 * 5 + 4 * 7 + 2 * 2 + 11
    assert stage.resident(PipelineShape("gpipe", 2, 4), 4, 0) == 100 + 4 * 3 + 4 * 5 + 4 * 7 + 3 * 11
    assert stage.resident(PipelineShape("interleaved1f1b", 2, 4, 2), 3, 0) == (
        100 + 8 * 3 + (4 + 1) * 5 + 4 * 7 + 2 + 2 * 11
    )
    phases = PhasePeaks(forward=50, backward=90, between=40)
    assert stage.peak(phases, 20, one, 1) == 170  # with gradients of earlier microbatches
    assert stage.peak(phases, 20, one, 2) == 130  # its plan counts them in the backward
    assert stage.peak(phases, 20, PipelineShape("1f1b", 1, 1), 1) == 90
    late = PhasePeaks(forward=0, backward=90, between=0)
    assert stage.peak(late, 6, PipelineShape("gpipe", 2, 20), 20) == 90 + 19 * (3 + 5 - 6)

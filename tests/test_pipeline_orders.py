"""Orders and replay of pipelines against PyTorch's own orders and a simulator of events; cuts against all cuts."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.sequence.pipeline.cuts import best_cuts, pareto_cuts
from hybridremat.sequence.pipeline.orders import PipelineShape
from hybridremat.sequence.pipeline.replay import StageTimes, replay
from support.torch_pipelines import event_time, most_waiting, torch_orders

SHAPES = [
    ("1f1b", 2, 2, 1),
    ("1f1b", 4, 4, 1),
    ("1f1b", 4, 9, 1),
    ("gpipe", 3, 2, 1),
    ("gpipe", 4, 8, 1),
    ("interleaved1f1b", 2, 4, 2),
    ("interleaved1f1b", 4, 8, 2),
    ("interleaved1f1b", 4, 3, 2),
    ("interleaved1f1b", 4, 10, 3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_orders_and_forwards_in_flight_are_those_of_torch(shape):
    ours, theirs = PipelineShape(*shape), torch_orders(*shape)
    assert ours.in_flight() == most_waiting(theirs, ours.stages)
    for device, order in enumerate(ours.orders()):
        for kind in ("forward", "backward"):
            mine = [(each.stage, each.microbatch) for each in order if each.kind == kind]
            assert mine == [(stage, m) for way, stage, m in theirs[device] if way == kind]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@given(data=st.data())
def test_replay_takes_as_long_as_events_in_the_order_of_torch(shape, data):
    ours = PipelineShape(*shape)
    numbers = st.integers(1, 10**6)
    times = [StageTimes(*data.draw(st.tuples(numbers, numbers, numbers))) for _ in range(ours.stages)]
    found = replay(ours.orders(), times).time
    seen = event_time(torch_orders(*shape), [(each.forward, each.backward, each.send) for each in times])
    assert abs(found - seen) <= 0.01 * seen


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
        if microbatches % devices:
            continue
        taken = replay(shape.orders(), [StageTimes(10, 20)] * shape.stages)
        expected = 30 * (shape.stages + shape.max_weight) // per_device
        assert taken.time == expected
        assert taken.bubble == pytest.approx((devices - 1) / (per_device * microbatches + devices - 1))

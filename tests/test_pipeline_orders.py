"""Orders and replay of pipelines against PyTorch's own orders and a simulator of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

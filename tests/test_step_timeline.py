"""The timeline of a step against the replay that sums its bytes, and against cases computed by hand."""

import copy

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

import hybridremat
from hybridremat.graph.joint import Phase, Schedule, plain_schedule
from hybridremat.graph.memory import ScheduleError, step_memory
from hybridremat.graph.segmentation.chain import Block, Chain
from hybridremat.reports.spans import Band
from hybridremat.reports.timeline import step_timeline
from support.examples import examples
from support.nets import transformer
from support.random_models import build, recipes
from support.random_steps import random_step, small_graph
from support.wrapping import HOW


def chain_of(graph, cut=0) -> Chain:
    """Two blocks: the ops before ``cut``, and all others but the last one."""
    forward = graph.phase_ops(Phase.FORWARD)
    backward = graph.phase_ops(Phase.BACKWARD)[:-1]
    blocks = (Block(forward[:cut], (), ()), Block(forward[cut:], (), backward))
    return Chain(graph, blocks, (frozenset(),) * 3, (frozenset(),) * 3, frozenset())


def assert_sums_up(chain: Chain, schedule: Schedule) -> None:
    memory = step_memory(chain.graph, schedule)
    timeline = step_timeline(chain, schedule)
    everywhere = range(len(schedule.steps))
    bands = timeline.band_bytes(everywhere)
    assert tuple(bands.sum(0).tolist()) == timeline.totals() == memory.profile
    assert timeline.peak_at == memory.peak_at
    assert (bands >= 0).all()
    for now in {0, schedule.num_forward - 1, memory.peak_at, everywhere[-1]} & set(everywhere):
        alive = [span for span in timeline.spans if span.birth <= now <= span.death]
        assert sum(span.size for span in alive) + timeline.temporary[now] == memory.profile[now]
        for row, band in enumerate(timeline.bands):
            own = timeline.temporary[now] if band == Band.TEMPORARY else 0
            assert sum(span.size for span in alive if span.band == band) + own == bands[row, now]


@examples(300)
@given(st.integers(0, 10**9), st.integers(0, 5))
def test_bands_of_random_steps_add_up_to_the_replay(seed, cut):
    graph, schedule = random_step(seed)
    assert_sums_up(chain_of(graph, cut), schedule)


@examples(6, least=2, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
@given(recipes(6))
def test_bands_of_planned_models_add_up_to_the_replay(recipe):
    model, batch = build(recipe)
    try:
        copy.deepcopy(model)(**batch)[0].backward()
    except RuntimeError:  # nothing in it learns, or it changes in place what its own backward needs
        assume(False)
    plan = hybridremat.plan(model, kwargs=batch, max_overhead=10.0, **HOW)
    assert plan.details is not None
    assert_sums_up(plan.details.chain, plan.schedule)
    assert_sums_up(plan.details.chain, plain_schedule(plan.details.graph))


def test_a_step_by_hand():
    graph = small_graph(gradients=frozenset({5}))
    timeline = step_timeline(chain_of(graph, 1), plain_schedule(graph))
    rows = dict(zip(timeline.bands, timeline.band_bytes(range(4)).tolist(), strict=True))
    assert rows == {
        0: [10, 10, 10, 10],
        1: [0, 20, 60, 0],
        Band.SHARED: [0, 0, 0, 0],
        Band.GRADIENTS: [0, 0, 0, 3],
        Band.PARAMETER_GRADIENTS: [0, 0, 0, 5],
        Band.TEMPORARY: [0, 100, 0, 0],
    }
    assert timeline.blocks == (0, 1, 1, None)
    alive = {graph.values[s.value].name: s.size for s in timeline.spans if s.birth <= 1 <= s.death}
    assert (alive, timeline.temporary[1]) == ({"a": 10, "b": 20}, 100)
    assert timeline.band_bytes([1, 3]).tolist() == [[row[1], row[3]] for row in rows.values()]


def test_an_op_of_several_blocks_runs_for_the_one_that_comes_next():
    graph = transformer(2)
    forward = graph.phase_ops(Phase.FORWARD)
    blocks = (Block((0, *forward[1:12]), (), ()), Block((0, *forward[12:]), (), ()))
    chain = Chain(graph, blocks, (frozenset(),) * 3, (frozenset(),) * 3, frozenset())
    timeline = step_timeline(chain, Schedule((*forward[:12], 0, *forward[12:]), len(forward) + 1))
    assert timeline.blocks[:13] == (0,) * 12 + (1,)


def test_reading_what_was_not_computed_is_refused():
    graph = small_graph()
    with pytest.raises(ScheduleError, match=r"step 1 \(c\) reads b before it is computed"):
        step_timeline(chain_of(graph), Schedule((0, 2), 2))


def test_an_empty_step():
    timeline = step_timeline(chain_of(small_graph()), Schedule((), 0))
    assert (timeline.totals(), timeline.peak_at) == ((), 0)

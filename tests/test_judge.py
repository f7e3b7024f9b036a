"""A judge is the count of a schedule's memory by its rules, and what is around the step: nothing else."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Schedule, ops_by_parts
from hybridremat.graph.pins import Pins
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.outside_memory import Moment, OutsideMemory, PhasePeaks
from hybridremat.sequence.pool import Pool, SchedulePoint
from support.examples import examples
from support.extreme_schedules import extreme_schedule
from support.joint_graphs import joint_graphs
from support.naive_memory import naive_profile


def alive_around(graph: JointGraph, schedule, reserve: int, forwards: int) -> list[int]:
    """Bytes at each execution, then between the phases: written down from what users are told."""
    profile, split = naive_profile(graph, schedule), schedule.num_forward
    nothing_more = replace(graph, released_outputs=frozenset())
    outputs = graph.released_outputs - graph.held_outputs
    dropped = (v for v in outputs if not is_read_in_backward(graph, schedule, v))
    released = sum(graph.values[value].bytes for value in dropped)
    saved = Judge(nothing_more).simulate(schedule).saved + released
    gradients = [graph.values[value].bytes for value in graph.gradients]
    tangents = sum(value.bytes for value in graph.values if value.tangent)
    waiting = (forwards - 1) * saved
    again = sum(gradients) + max(gradients, default=0) if forwards > 1 else 0
    held = max(0, reserve - tangents)
    inside = [
        bytes_ + waiting + (held + again if now >= split else 0) for now, bytes_ in enumerate(profile)
    ]
    return [*inside, saved + waiting + reserve]


def is_read_in_backward(graph: JointGraph, schedule, value: int) -> bool:
    """Whether the backward reads what the forward has made of an output, which is saved then."""
    steps = [graph.ops[op] for op in schedule.steps]
    births = [now for now, op in enumerate(steps) if value in op.writes]
    until = births[1] if births[1:] else len(steps) - 1
    return any(value in op.reads for op in steps[schedule.num_forward : until + 1])


@given(joint_graphs(), st.integers(0, 1000), st.sampled_from((0, 3, 700)), st.sampled_from((1, 2, 3)))
@examples(100, deadline=None)
def test_it_counts_what_the_rules_say(graph: JointGraph, seed: int, reserve: int, forwards: int) -> None:
    schedule = extreme_schedule(graph, seed, 0.5)
    assume(schedule.num_forward < len(schedule.steps))  # else no backward could leave gradients
    judge = Judge(graph, outside=OutsideMemory(reserve, forwards))
    found, around = judge(schedule), alive_around(graph, schedule, reserve, forwards)
    assert found.peak == max(naive_profile(graph, schedule))
    assert found.time == sum(graph.ops[op].time for op in schedule.steps)
    assert found.needs == judge.needs(schedule) == max(around)
    excess, top = judge.beyond(schedule, found.needs - 7)
    assert excess == 7 and around[top] == max(around[:-1])
    assert judge.profile(schedule).tolist() == around[:-1]


@given(joint_graphs(), st.integers(0, 1000))
@examples(60, deadline=None)
def test_no_schedule_needs_less_of_a_phase_than_its_limits_leave(graph: JointGraph, seed: int) -> None:
    judge = Judge(graph, outside=OutsideMemory(500, 2))
    schedule = extreme_schedule(graph, seed, 0.5)
    profile, split = naive_profile(graph, schedule), schedule.num_forward
    forward, backward = judge.phase_limits(judge.needs(schedule))
    assert max(profile[:split], default=0) <= forward and max(profile[split:], default=0) <= backward


@given(joint_graphs(), st.integers(0, 1000))
@examples(60, deadline=None)
def test_it_allows_what_does_as_the_pins_ask(graph: JointGraph, seed: int) -> None:
    schedule = extreme_schedule(graph, seed, 0.5)
    later = set(schedule.steps[schedule.num_forward :])
    twice = {op for op in schedule.steps[: schedule.num_forward] if op in later}
    assert Judge(graph).allows(schedule)
    for op in twice:
        assert not Judge(graph, Pins(must_save=frozenset({op}))).allows(schedule)


@given(joint_graphs(), st.integers(0, 1000))
@examples(30, deadline=None)
def test_of_ops_run_in_other_ways_it_is_the_judge_of_that_graph(graph: JointGraph, seed: int) -> None:
    schedule, other = extreme_schedule(graph, seed, 0.5), ops_by_parts(graph)
    slower = replace(other, ops=tuple(replace(op, time=op.time + 5, temp=op.temp + 8) for op in other.ops))
    judge = Judge(graph, outside=OutsideMemory(9, 1))
    assert judge.with_ops_of(slower)(schedule) == Judge(slower, outside=judge.outside)(schedule)


@given(joint_graphs(), st.integers(0, 1000), st.data())
@examples(60, deadline=None)
def test_one_of_several_graphs_needs_what_the_step_needs_at_every_moment(graph, seed, data) -> None:
    schedule = extreme_schedule(graph, seed, 0.5)
    split, profile = schedule.num_forward, naive_profile(graph, schedule)
    between = Judge(graph).phases(schedule).between
    numbers = st.tuples(st.integers(0, 2), st.integers(0, 900))
    moments = [
        Moment(phase, *data.draw(numbers))
        for phase in ("forward", "backward", "other")
        for _ in range(data.draw(st.integers(1, 2)))
    ]
    judge = Judge(graph, moments=tuple(moments))
    around = [
        max(m.saved * between + m.bytes for m in moments if m.phase == phase)
        for phase in ("forward", "backward", "other")
    ]
    every = [bytes_ + around[now >= split] for now, bytes_ in enumerate(profile)]
    expected = max(*every, *around)
    assert judge(schedule).needs == judge.needs(schedule) == expected
    excess, top = judge.beyond(schedule, expected - 3)
    assert excess == 3
    assert every[top] == expected if max(every) == expected else top in (split, len(every) - 1)
    forward, backward = judge.phase_limits(expected)
    assert max(profile[:split], default=0) <= forward and max(profile[split:], default=0) <= backward


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=14))
def test_a_pool_with_saved_bytes_keeps_what_nothing_beats_in_all_three(figures) -> None:
    points = [
        SchedulePoint(PhasePeaks(needs, 0, saved), time, n, Schedule((), 0), needs)
        for n, (needs, saved, time) in enumerate(figures)
    ]
    kept = [(p.needs, p.phases.between, p.time) for p in Pool.of(points, with_saved=True).points]
    distinct = set(figures)

    def beats(one, other):
        return one != other and all(x <= y for x, y in zip(one, other, strict=True))

    best = {one for one in distinct if not any(beats(other, one) for other in distinct)}
    assert len(kept) == len(best) and set(kept) == best
    assert [needs for needs, *_ in kept] == sorted(needs for needs, *_ in kept)

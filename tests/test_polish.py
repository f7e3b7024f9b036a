"""Polishing: what is decided again computes the same, keeps limit and pins, and is the best of its kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Phase, Schedule, plain_schedule
from hybridremat.graph.memory import MemorySimulator, schedule_time
from hybridremat.graph.pins import NO_PINS, Pins, obeys
from hybridremat.sequence.checkmate.stages import stages_of
from hybridremat.sequence.dead_code import DeadCodeElimination
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.polish import search
from hybridremat.sequence.polish.program import PolishProgram
from hybridremat.sequence.polish.search import ALL_OVER, INTO_DEPTH, Look, Polish
from hybridremat.sequence.polish.windows import windows
from support.examples import examples
from support.extreme_schedules import extreme_schedule
from support.joint_graphs import joint_graphs
from support.judges import AllowsOne
from support.naive_memory import naive_profile
from support.nets import Net, dear_and_cheap, transformer
from support.same_steps import assert_computes_the_same
from support.tiny_steps import schedules, tiny_steps

MORE = 2
"""Executions beyond one of each op in the schedules that are enumerated."""


def polish(
    graph: JointGraph, limit: int, pins: Pins = NO_PINS, look: Look = INTO_DEPTH, effort: float = 5.0
) -> Polish:
    return Polish(Judge(graph, pins), limit, replace(look, effort=effort))


@given(joint_graphs(), st.integers(0, 1000), st.sampled_from((0.3, 0.7, 1.0)))
@examples(60, deadline=None)
def test_what_is_found_computes_the_same_under_the_limit(graph: JointGraph, seed: int, share: float) -> None:
    graph = drawing_numbers(graph, seed)
    start = extreme_schedule(graph, seed, share)
    limit = max(naive_profile(graph, start))
    once = frozenset(op.id for op in graph.ops if start.steps.count(op.id) == 1 and op.id % 3 == 0)
    pins = Pins(must_save=once) if obeys(graph, start, Pins(must_save=once)) else NO_PINS
    found = polish(graph, limit, pins)(start)
    assert_computes_the_same(graph, found, start)
    assert max(naive_profile(graph, found)) <= limit
    assert schedule_time(graph, found) <= schedule_time(graph, start)
    assert obeys(graph, found, pins)


def writing_over_one(graph: JointGraph) -> JointGraph:
    """The graph with ops that write over one value at most, and over no output: so the program counts."""
    outputs = graph.held_outputs | graph.released_outputs | graph.gradients
    left = ([value for value in op.overwrites if value not in outputs][:1] for op in graph.ops)
    ops = zip(graph.ops, left, strict=True)
    return replace(graph, ops=tuple(replace(op, overwrites=tuple(over)) for op, over in ops))


def drawing_numbers(graph: JointGraph, which: int, state: int = 3) -> JointGraph:
    """The graph in which the ops of the bits of ``which`` draw numbers, from a generator of so many bytes."""
    ops = (replace(op, random=bool(which >> op.id & 1)) for op in graph.ops)
    return replace(graph, ops=tuple(ops), rng_state_bytes=state)


def is_of_the_kind(graph: JointGraph, schedule: Schedule) -> bool:
    """First the forward; before each op of the backward, earlier ops again, each once and in order."""
    order = plain_schedule(graph).steps
    split = len(graph.phase_ops(Phase.FORWARD))
    if tuple(dict.fromkeys(schedule.steps)) != order or schedule.steps[:split] != order[:split]:
        return False
    waiting: list[int] = []
    done = set(order[:split])
    for op in schedule.steps[split:]:
        if op in done:
            waiting.append(order.index(op))
            if graph.ops[op].phase is Phase.BACKWARD:
                return False
        elif waiting != sorted(set(waiting)):
            return False
        else:
            done.add(op)
            waiting = []
    return schedule.num_forward == split and not waiting


@given(tiny_steps(), st.integers(0, 15))
@examples(40, deadline=None)
def test_it_finds_the_optimum_of_its_kind(drawn: JointGraph, random: int) -> None:
    """From the slowest step of its kind under any limit, with all open; but for what is not worth it.

    The bits of ``random`` say which of the first ops draw numbers: to run again, they need a state.
    """
    graph = drawing_numbers(writing_over_one(drawn), random)
    kind = [each for each in schedules(graph, len(graph.ops) + MORE) if is_of_the_kind(graph, each)]
    figures = [(max(naive_profile(graph, each)), schedule_time(graph, each), each) for each in kind]
    for limit in {peak for peak, _, _ in figures}:
        fitting = [(time, each) for peak, time, each in figures if peak <= limit]
        slowest = max(fitting, key=lambda each: each[0])[1]
        found = polish(graph, limit)(DeadCodeElimination(graph)(slowest))
        assert max(naive_profile(graph, found)) <= limit
        assert schedule_time(graph, found) <= min(time for time, _ in fitting) + 1


def test_what_does_not_obey_is_not_taken() -> None:
    graph, start = dear_and_cheap()
    limit = max(naive_profile(graph, start))
    free = polish(graph, limit)
    assert schedule_time(graph, free(start)) == schedule_time(graph, start) - 990
    assert Polish(AllowsOne(graph, allowed=start), limit)(start) == start


@pytest.mark.parametrize(("state", "saved"), [(0, 990), (50, 990), (60, 900), (200, 900)])
def test_the_state_of_a_generator_that_a_recomputation_needs_takes_memory(state: int, saved: int) -> None:
    """The cheapest of three values draws numbers: with a large state the next one is made again instead."""
    net = Net()
    x = net.input()
    kinds = {"dear": 1000, "middling": 100, "cheap": 10}
    values = [net.layer(kind, [x], 100, time=time) for kind, time in kinds.items()]
    big = net.layer("big", [net.layer("join", values, 10)], 150, saves=False)
    net.derive(net.layer("loss", [big], 1, saves=False))
    graph = drawing_numbers(net.joint(), 1 << 2, state)
    forward, backward = (list(graph.phase_ops(phase)) for phase in (Phase.FORWARD, Phase.BACKWARD))
    reader = next(n for n, op in enumerate(backward) if values[0] in graph.ops[op].reads)
    start = Schedule((*forward, *backward[:reader], 0, *backward[reader:]), len(forward))
    found = polish(graph, max(naive_profile(graph, start)))(start)
    assert schedule_time(graph, found) == schedule_time(graph, start) - saved


FIGURES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 9_000)), min_size=3, max_size=7)


@given(FIGURES, st.floats(0, 1))
@examples(25, deadline=None)
def test_small_recomputations_all_over_the_step_fill_its_memory(figures, share) -> None:
    """As many as fit, or dear ones in place of cheap ones: from all of them, as the enumeration does."""
    net = Net()
    x = net.input()
    values = [net.layer("kept or not", [x], size, time=time) for size, time in figures]
    big = net.layer("big", [net.layer("join", values, 10, time=1_000_000)], 400, saves=False)
    net.derive(net.layer("loss", [big], 1, saves=False))
    graph = net.joint()
    forward, backward = (graph.phase_ops(phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    first = {value: next(op for op in backward if value in graph.ops[op].reads) for value in values}
    maker = {value: graph.values[value].producer for value in values}

    def again(chosen) -> Schedule:
        before = {op: [maker[value] for value in chosen if first[value] == op] for op in backward}
        steps = [each for op in backward for each in (*before[op], op)]
        return Schedule((*forward, *steps), len(forward))

    ways = [again(chosen) for n in range(len(values) + 1) for chosen in combinations(values, n)]
    peaks = {way: max(naive_profile(graph, way)) for way in ways}
    limit = peaks[ways[-1]] + int(share * max(0, peaks[ways[0]] - peaks[ways[-1]]))
    best = min(schedule_time(graph, way) for way in ways if peaks[way] <= limit)
    found = polish(graph, limit, look=ALL_OVER)(ways[-1])
    assert max(naive_profile(graph, found)) <= limit
    assert schedule_time(graph, found) <= best * (1 + ALL_OVER.worth)


def test_given_recomputations_stay_outside_a_window() -> None:
    graph = transformer(3)
    start = extreme_schedule(graph, 3, 0.7)
    stages = stages_of(graph, start)
    given = frozenset(stages.decisions(start)[0])
    found = windows(stages, given, 8, 60)
    assert len(found) > 1
    assert {op for _, op in given} <= {op for window in found for op in window.ops}
    limit = MemorySimulator(graph)(start).peak
    for window in found:
        program = PolishProgram(
            stages, limit, given=given, open_ops=window.ops, open_runs=window.runs
        )
        certain = {each for each, variable in program.runs.items() if program.program.lower[variable]}
        assert certain == {each for each in given if each[1] not in window.ops}
        assert set(program.runs) == certain | window.runs


def test_nothing_is_searched_without_effort_or_hope(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("it is searched")

    graph = transformer(2)
    start = extreme_schedule(graph, 3, 0.7)
    monkeypatch.setattr(search, "PolishProgram", refuse)
    assert polish(graph, 10**9, effort=0.0)(start) == start
    plain = stages_of(graph, start).schedule([()] * len(stages_of(graph, start)))
    assert polish(graph, 10**9)(plain) == plain

"""Moves to host memory on small made-up steps: bytes, times and places against counts of their own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import PAGE, Move, Schedule, plain_schedule
from hybridremat.graph.memory import MemorySimulator, ScheduleError, Waiting, step_memory
from hybridremat.sequence.offload.clocks import timed
from hybridremat.sequence.offload.link import Link
from hybridremat.sequence.offload.placement import Unmoved, place
from support.examples import examples
from support.moves import chains, every_move, mirrored
from support.naive_memory import naive_profile, naive_saved
from support.random_steps import random_step


def unmoved(graph):
    schedule, simulate = plain_schedule(graph), MemorySimulator(graph)
    memory = simulate(schedule)
    return Unmoved(
        np.array(memory.profile),
        tuple(graph.op_times[op] for op in schedule.steps),
        schedule.num_forward,
        tuple(simulate.waiting(schedule)),
        memory.saved + memory.released,
    )


@given(st.integers(0, 100_000), st.data())
@examples(200)
def test_bytes_are_those_of_the_naive_replay(seed, data):
    graph, plain = random_step(seed)
    waiting = MemorySimulator(graph).waiting(plain)
    picked = [data.draw(st.sampled_from([*every_move(each, plain.num_forward)])) for each in waiting]
    schedule = replace(plain, moves=tuple(each for each in picked if each))
    memory = step_memory(graph, schedule)
    assert list(memory.profile) == naive_profile(graph, schedule)
    assert memory.saved == naive_saved(graph, schedule)


@given(st.integers(0, 100_000))
@examples(200)
def test_what_waits_is_made_in_the_forward_read_in_the_backward_and_not_returned(seed):
    graph, schedule = random_step(seed)
    steps, split = schedule.steps, schedule.num_forward
    returned = graph.held_outputs | graph.released_outputs | graph.gradients | graph.leaving
    found = []
    for birth, op in enumerate(steps[:split]):
        for value in graph.ops[op].writes:
            again = [at for at in range(birth + 1, len(steps)) if value in graph.ops[steps[at]].writes]
            until = min([again[0] + 1, len(steps)] if again else [len(steps)])
            reads = [at for at in range(birth + 1, until) if value in graph.ops[steps[at]].reads]
            ahead, behind = ([r for r in reads if r < split], [r for r in reads if r >= split])
            if behind and graph.values[value].bytes and value not in returned:
                size = graph.values[value].bytes
                found.append(Waiting(value, size, birth, max(ahead, default=birth), min(behind)))
    seen = [each for each in MemorySimulator(graph).waiting(schedule) if each.value not in returned]
    assert sorted(found, key=lambda each: (each.birth, each.value)) == seen


def test_a_move_of_what_is_not_there_is_an_error():
    graph = mirrored([5, 5, 5])  # value 0 is read by steps 1 and 5, and is gone from 2 to 4 at most
    plain = plain_schedule(graph)
    fits = Move(0, 0, 2, 5, 5)
    assert step_memory(graph, replace(plain, moves=(fits,))).saved == 10
    changes = {"birth": 1, "value": 5, "free": 1, "fetch": 2, "ready": 4}
    wrong = [(replace(fits, **{name: value}),) for name, value in changes.items()]
    for moves in (*wrong, (replace(fits, free=4),), (replace(fits, fetch=6),), (fits, fits)):
        with pytest.raises(ScheduleError, match="does not wait"):
            step_memory(graph, replace(plain, moves=moves))


@dataclass(frozen=True)
class Task:
    """Something that takes time on one of three queues, after others."""

    queue: str
    time: int
    after: tuple[str, ...] = ()


def simulated(times, moves, sizes, link):
    """The end of a step by its tasks: each queue runs its own in the order in which they are put there."""
    tasks: dict[str, Task] = {}
    host = ("out", "back") if link.duplex else ("link", "link")
    last = ""
    for now in range(len(times) + 1):
        for n, move in enumerate(moves):
            if move.birth == now - 1:
                tasks[f"out {n}"] = Task(host[0], link.out_ns(sizes[n]), (f"run {now - 1}",))
        for n, move in enumerate(moves):
            if move.free == now:
                last = f"drop {n} {now}"
                tasks[last] = Task("compute", 0, (f"out {n}",))
        starts = sorted((move.ready, n) for n, move in enumerate(moves) if move.fetch == now)
        for _, n in starts:
            after = (f"out {n}", last) if last else (f"out {n}",)
            tasks[f"back {n}"] = Task(host[1], link.back_ns(sizes[n]), after)
        for n, move in enumerate(moves):
            if move.ready == now:
                last = f"wait {n}"
                tasks[last] = Task("compute", 0, (f"back {n}",))
        if now < len(times):
            last = f"run {now}"
            tasks[last] = Task("compute", times[now])
    ends: dict[str, int] = {}
    queues: dict[str, int] = {}
    for name, task in tasks.items():
        start = max([queues.get(task.queue, 0), *(ends[each] for each in task.after)])
        ends[name] = queues[task.queue] = start + task.time
    return max(end for name, end in ends.items() if not name.startswith(("out", "back")))


LINKS = st.builds(
    Link,
    out=st.sampled_from([0.2e9, 0.5e9, 1e9, 3e9]),
    back=st.sampled_from([0.3e9, 1e9, 2e9]),
    latency=st.integers(0, 5),
    duplex=st.booleans(),
)


@given(chains(), LINKS, st.data())
@examples(100)
def test_time_is_that_of_tasks_on_three_queues(graph, link, data):
    step = unmoved(graph)
    picked = [data.draw(st.sampled_from([*every_move(each, step.split)])) for each in step.waiting]
    moves = [each for each in picked if each]
    sizes = [graph.values[each.value].bytes for each in moves]
    found, out, back = timed(step.times, moves, sizes, link)
    assert found.total == simulated(step.times, moves, sizes, link)
    assert found.total == sum(step.times) + found.waits_out + found.waits_back
    assert found.out == sum(map(link.out_ns, sizes)) and found.back == sum(map(link.back_ns, sizes))
    for copies in (sorted(out, key=lambda c: c.start), sorted(back, key=lambda c: c.start)):
        assert all(one.end <= other.start for one, other in itertools.pairwise(copies))


def best_of_all(step, graph, limit, link):
    """The least time of all moves that keep a limit; None if none do."""
    best = None
    for picked in itertools.product(*(tuple(every_move(each, step.split)) for each in step.waiting)):
        moves = tuple(each for each in picked if each)
        plain = plain_schedule(graph)
        if step_memory(graph, Schedule(plain.steps, plain.num_forward, moves)).peak > limit:
            continue
        time = timed(step.times, moves, [graph.values[m.value].bytes for m in moves], link)[0].total
        best = time if best is None else min(best, time)
    return best


@given(chains(most=4, equal=True), LINKS, st.integers(30, 95))
@examples(40)
def test_equal_sizes_are_placed_as_well_as_in_any_way(graph, link, share):
    step = unmoved(graph)
    limit = int(step.profile.max()) * share // 100
    best, moves = best_of_all(step, graph, limit, link), place(step, limit)
    assert (best is None) == (moves is None)
    if moves is not None:
        plain = plain_schedule(graph)
        assert step_memory(graph, Schedule(plain.steps, plain.num_forward, moves)).peak <= limit
        assert timed(step.times, moves, [10] * len(moves), link)[0].total == best


@given(chains(most=6), st.integers(20, 100), st.integers(0, 6))
@examples(60)
def test_no_more_waits_than_there_is_room_for(graph, share, pages):
    step, plain = unmoved(graph), plain_schedule(graph)
    limit = int(step.profile.max()) * share // 100
    moves, every = place(step, limit, room=pages * PAGE), place(step, limit)
    if every is not None and len(every) <= pages:  # each is smaller than a page
        assert moves == every
    if moves is not None:
        assert len(moves) <= pages
        assert step_memory(graph, Schedule(plain.steps, plain.num_forward, moves)).peak <= limit


@given(chains(most=5), st.integers(20, 100), st.integers(0, 100))
@examples(60)
def test_as_little_is_saved_as_others_leave_room_for(graph, share, left):
    step, plain = unmoved(graph), plain_schedule(graph)
    limit, saved = int(step.profile.max()) * share // 100, step.saved * left // 100
    moves, every = place(step, limit, saved=saved), place(step, limit)
    least = step.saved - sum(each.bytes for each in step.waiting)
    assert (moves is None) == (every is None or least > saved)
    if moves is not None:
        counted = step_memory(graph, Schedule(plain.steps, plain.num_forward, moves))
        assert counted.peak <= limit and counted.saved + counted.released <= saved


@given(chains(most=4), st.integers(20, 100))
@examples(60)
def test_places_keep_the_limit_wherever_any_do(graph, share):
    step = unmoved(graph)
    limit = int(step.profile.max()) * share // 100
    moves = place(step, limit)
    plain = plain_schedule(graph)
    if moves is not None:
        assert step_memory(graph, Schedule(plain.steps, plain.num_forward, moves)).peak <= limit
    assert (moves is None) == (best_of_all(step, graph, limit, Link(1e9, 1e9)) is None)

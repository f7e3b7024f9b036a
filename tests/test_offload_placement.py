"""Moves to host memory on small made-up steps: bytes, times and places against counts of their own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Move, Op, Phase, Schedule, Value, plain_schedule
from hybridremat.graph.memory import MemorySimulator, ScheduleError, step_memory
from hybridremat.sequence.offload.arena import PAGE, arena
from hybridremat.sequence.offload.clocks import timed
from hybridremat.sequence.offload.link import Link
from hybridremat.sequence.offload.placement import Unmoved, place
from support.examples import examples


def mirrored(sizes, times=None):
    """A chain: each forward op makes a value from the one before, and each backward op reads one of them."""
    count = len(sizes)
    times = times or [1] * (2 * count)
    values = [Value(n, size, n) for n, size in enumerate(sizes)]
    values += [Value(count + n, 1, count + n) for n in range(count)]
    ops = [Op(n, f"f{n}", Phase.FORWARD, (n - 1,) if n else (), (n,), time=times[n]) for n in range(count)]
    for n in range(count):
        reads = (count - 1 - n, *((count + n - 1,) if n else ()))
        ops.append(Op(count + n, f"b{n}", Phase.BACKWARD, reads, (count + n,), time=times[count + n]))
    return JointGraph(tuple(ops), tuple(values), gradients=frozenset({2 * count - 1}))


def counted(graph, schedule):
    """Bytes at each execution, one by one: what is on the device, version by version."""
    end, split = len(schedule.steps), schedule.num_forward
    profile = []
    for now in range(end):
        alive = 0
        for birth in range(now + 1):
            for value in graph.ops[schedule.steps[birth]].writes:
                reads = [at for at in range(end) if value in graph.ops[schedule.steps[at]].reads]
                death = end if value in graph.gradients else max(reads, default=birth)
                moves = [m for m in schedule.moves if (m.value, m.birth) == (value, birth)]
                away = any(m.free <= now < m.fetch for m in moves)
                alive += graph.values[value].bytes * (now <= death and not away)
        profile.append(alive)
    saved = sum(
        graph.values[value].bytes
        for birth in range(split)
        for value in graph.ops[schedule.steps[birth]].writes
        if any(value in graph.ops[op].reads for op in schedule.steps[split:])
        and not any(m.value == value for m in schedule.moves)
    )
    return profile, saved


@st.composite
def chains(draw, most=5, equal=False):
    count = draw(st.integers(2, most))
    size = st.just(10) if equal else st.integers(1, 20)
    sizes = draw(st.lists(size, min_size=count, max_size=count))
    times = draw(st.lists(st.integers(1, 40), min_size=2 * count, max_size=2 * count))
    return mirrored(sizes, times)


def unmoved(graph):
    schedule, simulate = plain_schedule(graph), MemorySimulator(graph)
    return Unmoved(
        np.array(simulate(schedule).profile),
        tuple(graph.op_times[op] for op in schedule.steps),
        schedule.num_forward,
        tuple(simulate.waiting(schedule)),
    )


def every_move(each, split):
    """All moves of one version, and none."""
    yield None
    for free, fetch in itertools.product(range(each.last + 1, split + 1), range(split, each.first + 1)):
        yield Move(each.value, each.birth, free, fetch, each.first)


@given(chains(), st.data())
@examples(60)
def test_bytes_are_those_of_a_count_one_by_one(graph, data):
    plain, step = plain_schedule(graph), unmoved(graph)
    picked = [data.draw(st.sampled_from([*every_move(each, step.split)])) for each in step.waiting]
    schedule = Schedule(plain.steps, plain.num_forward, tuple(each for each in picked if each))
    memory = step_memory(graph, schedule)
    profile, saved = counted(graph, schedule)
    assert list(memory.profile) == profile and memory.saved == saved
    assert memory.peak == max(profile)


def test_a_move_of_what_is_not_there_is_an_error():
    graph = mirrored([5, 5, 5])
    plain = plain_schedule(graph)
    for move in (Move(0, 1, 3, 3, 5), Move(5, 0, 3, 3, 5)):
        with pytest.raises(ScheduleError, match="a move"):
            step_memory(graph, Schedule(plain.steps, plain.num_forward, (move,)))


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


@given(chains(most=6), st.integers(20, 100))
@examples(40)
def test_no_byte_of_the_host_is_shared_by_what_is_there_together(graph, share):
    step = unmoved(graph)
    moves = place(step, int(step.profile.max()) * share // 100) or ()
    sizes = [graph.values[each.value].bytes * 1000 for each in moves]
    made = arena(moves, sizes)
    for one, other in itertools.combinations(range(len(moves)), 2):
        together = moves[one].birth <= moves[other].ready and moves[other].birth <= moves[one].ready
        first, second = sorted((made.offsets[each], sizes[each]) for each in (one, other))
        assert not together or first[0] + first[1] <= second[0]
    assert made.size % PAGE == 0
    assert all(at + size <= made.size for at, size in zip(made.offsets, sizes, strict=True))

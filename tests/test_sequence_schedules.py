"""Flat schedules and frontiers on small random training graphs, judged by replays written here."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybridremat.blocks.pareto import enumerate_options
from hybridremat.blocks.problem import bind_block
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import BlockBinding, BlockProblem, Option, OptionSet
from hybridremat.graph.joint import JointGraph, Op, Phase, Schedule, Value, plain_schedule
from hybridremat.graph.memory import schedule_time, step_memory
from hybridremat.graph.pins import Pins
from hybridremat.graph.segmentation.chain import Block, Chain
from hybridremat.graph.segmentation.segment import segment
from hybridremat.sequence.backtrack import Backtracker
from hybridremat.sequence.chain_problem import chain_problem
from hybridremat.sequence.decisions import Backward, Forward, ForwardOption, block_decisions
from hybridremat.sequence.dynamic_program import chain_table
from hybridremat.sequence.flatten import Flattener
from hybridremat.sequence.frontier import (
    BESIDE,
    SPREAD,
    evenly_spaced,
    frontier,
    look_near,
)
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.outside_memory import PhasePeaks
from hybridremat.sequence.pool import Pool, SchedulePoint
from support.examples import examples
from support.random_chains import training_chain


def random_option(problem: BlockProblem, random: Random, share: float, *, solo: bool = False) -> Option:
    """Save some values; before each backward step recompute, once, all that it still lacks."""
    saved = set() if solo else {d for d in range(len(problem.value_bytes)) if random.random() < share}
    early = {c for c, op in enumerate(problem.ops) if op.optional and not solo and random.random() < share}
    for c, op in reversed(list(enumerate(problem.ops))):
        if c in early:
            early |= {
                p
                for p, other in enumerate(problem.ops)
                if other.optional and set(other.writes) & set(op.reads)
            }
    ran = set() if solo else {c for c, op in enumerate(problem.ops) if not op.optional or c in early}
    # an output may as well be computed again, so that nobody holds it for this block
    left = {d for d in problem.outputs if random.random() < 0.4}
    alive = (saved | (set() if solo else set(problem.outputs - left))) & {
        d for c in ran for d in problem.ops[c].writes
    }
    recompute = []
    for step in problem.steps:
        lacking: set[int] = set()
        wanted = set(step.reads) - alive
        for c in range(len(problem.ops) - 1, -1, -1):
            if wanted & set(problem.ops[c].writes):
                lacking.add(c)
                wanted |= set(problem.ops[c].reads) - alive
        recompute.append(sorted(lacking))
        alive |= {d for c in lacking for d in problem.ops[c].writes}
    return simulate_option(problem, saved, early, recompute, solo=solo)


def option_sets(bindings: list[BlockBinding], random: Random, count: int = 4) -> list[OptionSet]:
    shares = (1.0, 0.6, 0.3, 0.0)
    return [
        OptionSet(
            tuple(random_option(b.problem, random, shares[i % 4]) for i in range(count)),
            (random_option(b.problem, random, 0.0, solo=True),),
        )
        for b in bindings
    ]


def prepared(seed: int) -> tuple[Chain, list[BlockBinding], list[OptionSet]]:
    chain = training_chain(seed)
    bindings = [bind_block(chain, i) for i in range(len(chain.blocks))]
    return chain, bindings, option_sets(bindings, Random(seed))


def check_complete(graph: JointGraph, schedule: Schedule) -> None:
    """Every op that must run runs, in its phase, and what may not run twice does not."""
    runs = Counter(schedule.steps)
    early = Counter(schedule.steps[: schedule.num_forward])
    for op in graph.ops:
        assert op.phase is Phase.OPTIONAL or runs[op.id] >= 1, op
        assert op.phase is not Phase.FORWARD or early[op.id] == 1, op
        assert op.phase is not Phase.BACKWARD or (early[op.id] == 0 and runs[op.id] == 1), op
        assert op.recomputable or runs[op.id] == 1, op


def check_no_dead_execution(graph: JointGraph, schedule: Schedule) -> None:
    """Each recomputation and optional op has a later reader before the value is made again."""
    first: set[int] = set()
    for now, op in enumerate(schedule.steps):
        again = op in first
        first.add(op)
        if not again and graph.ops[op].phase is not Phase.OPTIONAL:
            continue
        pending = set(graph.ops[op].writes)
        for later in schedule.steps[now + 1 :]:
            if pending & set(graph.ops[later].reads):
                break
            pending -= set(graph.ops[later].writes)
        else:
            raise AssertionError(f"execution {now} of op {op} is read by nobody")


def unplanned_time(chain: Chain) -> int:
    """Time of what runs once, whatever is decided."""
    ops = chain.graph.ops
    re_run = {op for b in chain.blocks for op in b.forward if set(ops[op].writes) - chain.always}
    return sum(op.time for op in ops if op.phase is not Phase.OPTIONAL and op.id not in re_run)


def uncounted(chain: Chain) -> int:
    """Most bytes in no figure of a block: temporaries of ops that run once, and what they alone read."""
    ops, values = chain.graph.ops, chain.graph.values
    most = 0
    for block in chain.blocks:
        once = [op for op in block.forward if not set(ops[op].writes) - chain.always]
        others = set(block.forward + block.optional + block.backward) - set(once)
        seen = {v for op in others for v in ops[op].reads}
        alone = {v for op in once for v in ops[op].reads} - seen - chain.always
        most = max(most, sum(values[v].bytes for v in alone) + max((ops[op].temp for op in once), default=0))
    return most


@examples(120)
@given(st.integers(0, 10**6))
def test_rebuilt_schedules_run_and_keep_to_the_table(seed: int) -> None:
    chain, bindings, options = prepared(seed)
    graph, problem = chain.graph, chain_problem(chain, bindings, options)
    plain = step_memory(graph, plain_schedule(graph)).peak
    table = chain_table(problem, memory=2 * plain, slots=2 * plain)
    rebuild, flatten = Backtracker(table), Flattener(chain, bindings, options)
    constant = unplanned_time(chain)
    assert table.breakpoints()
    for slot in table.breakpoints():
        schedule = flatten(rebuild(slot))
        check_complete(graph, schedule)
        check_no_dead_execution(graph, schedule)
        memory = step_memory(graph, schedule)
        early = memory.peak_at < schedule.num_forward
        assert memory.peak <= table.peak_bytes(slot) + early * uncounted(chain)
        assert schedule_time(graph, schedule) <= table.top[slot] + constant


@examples(40)
@given(st.integers(0, 10**6))
def test_the_frontier_is_a_pareto_set_of_exact_figures(seed: int) -> None:
    chain, bindings, options = prepared(seed)
    points = frontier(chain, bindings, options).points
    plain = Judge(chain.graph)(plain_schedule(chain.graph))
    assert points == frontier(chain, bindings, options).points
    assert any(p.peak <= plain.peak and p.time <= plain.time for p in points)
    for before, after in pairwise(points):
        assert before.peak < after.peak and before.time > after.time
    for point in points:
        assert point.peak == step_memory(chain.graph, point.schedule).peak
        assert point.time == point.flops == schedule_time(chain.graph, point.schedule)
        assert not point.decisions or len(block_decisions(point.decisions)) == len(chain.blocks)


@examples(60)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(20, 200))
def test_more_options_never_cost_more_than_the_table_of_fewer(seed: int, few: int, slots: int) -> None:
    chain = training_chain(seed)
    bindings = [bind_block(chain, i) for i in range(len(chain.blocks))]
    more = option_sets(bindings, Random(seed), 8)
    fewer = [OptionSet(options.options[:few], options.solo) for options in more]
    plain = step_memory(chain.graph, plain_schedule(chain.graph)).peak
    problems = [chain_problem(chain, bindings, options) for options in (fewer, more)]
    small, large = (chain_table(problem, memory=plain, slots=slots) for problem in problems)
    assert (large.top <= small.top).all()
    points = frontier(chain, bindings, more).points
    constant = unplanned_time(chain)
    finest = chain_table(problems[0], memory=plain)
    for slot in finest.breakpoints():
        fitting = [p.time for p in points if p.peak <= finest.peak_bytes(slot) + uncounted(chain)]
        assert min(fitting) <= finest.top[slot] + constant


def point(figures: tuple[int, int]) -> SchedulePoint:
    """A point of these bytes and nanoseconds."""
    peak, time = figures
    return SchedulePoint(PhasePeaks(peak, 0, 0), time, 0, Schedule((), 0), needs=peak)


def test_merging_keeps_the_better_points() -> None:
    def fronts(points: list[tuple[int, int]], base: list[tuple[int, int]]) -> Pool:
        return Pool.of(map(point, points), map(point, base))

    merged = Pool.merged(
        [fronts([(10, 5), (20, 1)], [(20, 1)]), fronts([(12, 6), (9, 7), (20, 0)], [(12, 6)])]
    )
    assert [(p.peak, p.time) for p in merged.points] == [(9, 7), (10, 5), (20, 0)]
    assert [(p.peak, p.time) for p in merged.base] == [(12, 6), (20, 1)]
    slower = merged.mapped(lambda p: [point((p.peak, p.time + 9)), point((p.peak + 3, p.time))])
    assert [(p.peak, p.time) for p in slower.base] == [(12, 15), (15, 6), (23, 1)]


def test_one_binding_and_option_set_for_each_block() -> None:
    chain, bindings, options = prepared(3)
    with pytest.raises(ValueError, match="a chain needs one of each for every block"):
        chain_problem(chain, bindings[1:], options)


@example([5, 6, 72, 139, 206, 272, 339, 406, 472], 8)  # in floating point, nine intervals
@given(st.lists(st.integers(0, 500), min_size=1, unique=True).map(sorted), st.integers(2, 40))
def test_spread_keeps_the_ends_and_the_speed_for_a_little_more_memory(slots: list[int], most: int) -> None:
    kept = evenly_spaced(slots, most)
    assert len(kept) <= most and set(kept) <= set(slots)
    assert kept[0] == slots[0] and kept[-1] == slots[-1]
    width = Fraction(slots[-1] - slots[0], most - 1)
    for slot in slots:
        assert any(0 <= other - slot < width or other == slot for other in kept)


@given(
    st.sampled_from([0, 1, 2, 26, 100, 300]),
    st.randoms(use_true_random=False),
    st.lists(st.tuples(st.integers(800, 2100), st.integers(0, 100)), max_size=3),
)
@examples(100)
def test_all_is_looked_at_in_ranges_and_little_elsewhere(
    count: int, random: Random, starts: list[tuple[int, int]]
) -> None:
    """Where more slots need more bytes; whatever they need, the first and the last are asked."""
    needs = sorted(random.randrange(900, 2000) for _ in range(count))
    asked: list[int] = []

    def point_at(slot: int) -> SchedulePoint:
        asked.append(slot)
        return point((needs[slot], 1000 - slot))

    slots = range(len(needs))
    ranges = [(low, low + width) for low, width in starts]
    base = look_near(slots, point_at, ranges)
    near = {n for n in slots for low, high in ranges if low < needs[n] <= high}
    least = {n for n in slots if needs[n] <= 1.05 * needs[0]}
    assert near | least <= set(asked)
    for low, _ in ranges:
        first = max(0, sum(need <= low for need in needs) - 1)  # the last that fits
        assert set(slots[first : first + BESIDE]) <= set(asked)
    beside = (BESIDE + 2 * 9) * (len(ranges) + 1)  # at both ends of what is near, and by bisection of 300
    assert len(set(asked)) <= len(near | least) + beside + SPREAD + 1
    assert least <= {1000 - each.time for each in base}
    assert look_near(slots, point_at, [(0, 1)]) == base == look_near(slots, point_at, None)
    assert set(asked) == set(slots)


def masked_chain() -> Chain:
    """Two blocks that each make their own mask (op 0) from an input; only block 0's backward reads it."""
    ops = (
        Op(0, "mask", Phase.FORWARD, (0,), (1,), time=1, flops=1),
        Op(1, "a", Phase.FORWARD, (1,), (2,), time=10, flops=10),
        Op(2, "b", Phase.FORWARD, (1, 2), (3,), time=10, flops=10),
        Op(3, "b_grad", Phase.BACKWARD, (3,), (4,), time=20, flops=20),
        Op(4, "a_grad", Phase.BACKWARD, (1, 4), (5,), time=20, flops=20),
    )
    values = (Value(0, 1, None), *(Value(v, 8, v - 1) for v in range(1, 6)))
    graph = JointGraph(ops, values, gradients=frozenset({5}))
    blocks = (Block((0, 1), (), (4,)), Block((0, 2), (), (3,)))
    none: frozenset[int] = frozenset()
    return Chain(
        graph, blocks, (none, frozenset({2}), none), (none, frozenset({4}), none), none, frozenset({0})
    )


def test_copies_of_a_rebuilt_op_stay_where_they_are_read() -> None:
    chain = masked_chain()
    bindings = [bind_block(chain, i) for i in range(2)]
    first, second = bindings[0].problem, bindings[1].problem
    kept = simulate_option(first, {0, 1}, (), [()])
    remade = simulate_option(first, {1}, (), [(0,)])
    whole = OptionSet((simulate_option(second, range(len(second.value_bytes)), (), [()]),), ())
    flatten = Flattener(chain, bindings, [OptionSet((kept, remade), ()), whole])
    for option, steps in ((0, (0, 1, 0, 2, 3, 4)), (1, (0, 1, 0, 2, 3, 0, 4))):
        decisions = ForwardOption(0, option), ForwardOption(1, 0), Backward(1, 0), Backward(0, option)
        assert flatten(decisions) == Schedule(steps, 4)
    # a checkpoint after block 0, whose copy for its own backward is not made before it is needed
    checkpoint = Forward(0), ForwardOption(1, 0), Backward(1, 0), ForwardOption(0, 0), Backward(0, 0)
    assert flatten(checkpoint) == Schedule((0, 1, 0, 2, 3, 0, 4), 4)


def test_an_optional_op_that_reads_a_later_block_waits_for_it_in_the_forward() -> None:
    """Block 0 makes ``late`` from its own value and an always-saved one of the last block."""
    forward = [Op(i, f"f{i}", Phase.FORWARD, (i,), (i + 1,), time=5) for i in range(6)]
    late = Op(6, "late", Phase.OPTIONAL, (1, 6), (7,), time=50)
    backward = Op(7, "b", Phase.BACKWARD, (7, 8), (9,), time=1)
    values = [Value(i, 100, i - 1 if i else None) for i in range(7)]
    values += [Value(7, 10, 6), Value(8, 1, None, tangent=True), Value(9, 100, 7)]
    graph = JointGraph((*forward, late, backward), tuple(values), gradients=frozenset({9}))
    pins = Pins(must_save=frozenset({5}))
    chain = segment(graph, max_ops=2, pins=pins)
    assert late.id in chain.blocks[0].optional and 6 in chain.always and len(chain.blocks) > 1
    bindings = [bind_block(chain, index) for index in range(len(chain.blocks))]
    options = [enumerate_options(binding.problem) for binding in bindings]
    early = [number for number, option in enumerate(options[0].options) if option.optional_forward]
    assert early
    for number in early:
        rest = range(1, len(chain.blocks))
        decisions = [ForwardOption(0, number), *(ForwardOption(s, 0) for s in rest)]
        decisions += [Backward(s, 0) for s in reversed(rest)] + [Backward(0, number)]
        schedule = Flattener(chain, bindings, options)(decisions)
        step_memory(graph, schedule)  # raises if a value is read before it is made
        assert schedule.steps.index(late.id) > schedule.steps.index(5)

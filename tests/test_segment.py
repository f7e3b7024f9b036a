"""Chains made by ``segment``: what every chain must promise, and answers checked by hand."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Phase, Schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.segmentation.chain import Block, Chain
from hybridremat.graph.segmentation.cuts import block_sizes
from hybridremat.graph.segmentation.minimum_cut import source_side
from hybridremat.graph.segmentation.segment import segment
from hybridremat.graph.segmentation.validate import validate_chain
from support.examples import examples
from support.joint_graphs import joint_graphs
from support.nets import Net, transformer


def replay_every_block(chain: Chain) -> Schedule:
    """Keep what crosses the cuts and what is always kept, make everything else again for each block."""
    graph = chain.graph
    steps = [op for block in chain.blocks for op in block.forward]
    num_forward = len(steps)
    for block in reversed(chain.blocks):
        again = [op for op in block.forward if graph.ops[op].recomputable]
        steps += [*again, *block.optional, *block.backward]
    return Schedule(tuple(steps), num_forward)


def run_with_forgetting(chain: Chain) -> set[int]:
    """Run :func:`replay_every_block` on a machine that holds no more than that; return the ops that ran."""
    graph = chain.graph
    resident = {value.id for value in graph.values if value.producer is None}
    ran: set[int] = set()

    def run(op: int, *known: set[int]) -> None:
        missing = set(graph.ops[op].reads) - resident.union(*known)
        assert not missing, f"{graph.ops[op].name} misses {missing}"
        ran.add(op)

    always: set[int] = set()
    for number, block in enumerate(chain.blocks):
        here = set(chain.boundary[number])
        for op in block.forward:
            run(op, here, always)
            here.update(graph.ops[op].writes)
            always |= chain.always & set(graph.ops[op].writes)
    gradients: set[int] = set()
    for number in reversed(range(len(chain.blocks))):
        block = chain.blocks[number]
        gradients &= chain.gradient_boundary[number + 1]
        here = set(chain.boundary[number])
        for op in (*(op for op in block.forward if graph.ops[op].recomputable), *block.optional):
            run(op, here, always)
            here.update(graph.ops[op].writes)
        for op in block.backward:
            run(op, here, always, gradients)
            gradients.update(graph.ops[op].writes)
    return ran


@examples(150)
@given(joint_graphs(), st.integers(1, 12))
def test_any_graph_becomes_a_valid_chain(graph, max_ops):
    chain = segment(graph, max_ops=max_ops)
    validate_chain(chain)
    for block in chain.blocks:
        real = [op for op in block.forward if not chain.always.issuperset(graph.ops[op].writes)]
        assert len(real) <= max_ops
    assert chain.always >= {v for v in graph.held_outputs if graph.values[v].producer is not None}


@examples(150)
@given(joint_graphs(), st.integers(1, 12))
def test_every_block_can_be_rebuilt_from_its_boundary(graph, max_ops):
    # A gradient that is read in a later-run block too is held to the end, so it may cross unlisted.
    chain = segment(dataclasses.replace(graph, gradients=frozenset()), max_ops=max_ops)
    assert run_with_forgetting(chain) == set(range(len(graph.ops)))
    step_memory(graph, replay_every_block(chain))  # raises if a value is read before it is made


def layer_form(chain: Chain, number: int) -> tuple[object, ...]:
    """A block up to ids: values renamed in order of appearance."""
    graph, block = chain.graph, chain.blocks[number]
    names: dict[int, int] = {}
    form: list[object] = []
    for part in (block.forward, block.optional, block.backward):
        for op in (graph.ops[op] for op in part):
            values = [(names.setdefault(v, len(names)), graph.values[v].bytes) for v in op.reads + op.writes]
            form.append((op.phase, op.target, op.time, tuple(values)))
    for crossing in (chain.boundary, chain.gradient_boundary):
        for at in (number, number + 1):
            form.append(tuple(sorted(names.get(v, -1) for v in crossing[at])))
    return tuple(form)


@pytest.mark.parametrize(("max_ops", "kinds_in_the_middle"), [(12, 1), (11, 1), (24, 1), (7, 2)])
def test_layers_of_a_transformer_stay_identical(max_ops, kinds_in_the_middle):
    chain = segment(transformer(12), max_ops=max_ops)
    validate_chain(chain)
    forms = [layer_form(chain, number) for number in range(len(chain.blocks))]
    assert len(set(forms[1:-2])) == kinds_in_the_middle
    assert len(set(forms)) <= kinds_in_the_middle + 3


def test_a_transformer_is_cut_at_its_residual_stream():
    graph = transformer(6)
    chain = segment(graph, max_ops=11)
    for boundary in chain.boundary[1:-1]:
        assert [graph.values[v].bytes for v in boundary] == [1000]


def narrow_net() -> JointGraph:
    """Eight ops; only the values after the third and the sixth are narrow."""
    net = Net()
    value = net.input()
    for size in (900, 900, 100, 900, 900, 100, 900, 900):
        value = net.layer("linear", [value], size, weight=500)
    net.held.add(value)
    net.derive(value)
    return net.joint()


def test_cuts_fall_where_the_boundary_is_narrow():
    chain = segment(narrow_net(), max_ops=3)
    assert [len(block.forward) for block in chain.blocks] == [3, 3, 2]
    assert [sum(chain.graph.values[v].bytes for v in cut) for cut in chain.boundary] == [0, 100, 100, 0]
    assert [sum(chain.graph.values[v].bytes for v in cut) for cut in chain.gradient_boundary] == [
        0,
        100,
        100,
        0,
    ]


def test_cuts_avoid_rebuilding_costly_ops():
    """Between two places of equal bytes, cut where the costly product need not be made again."""

    def net_with(costly_first: bool) -> JointGraph:
        net = Net()
        value = net.input()
        for number in range(6):
            costly = number == (2 if costly_first else 1)
            value = net.layer("linear", [value], 100, time=1000 if costly else 1)
        net.held.add(value)
        net.derive(value)
        return net.joint()

    # The costly op ends its block, so that its output is the boundary that is held anyway.
    assert len(segment(net_with(True), max_ops=4).blocks[0].forward) == 3
    assert len(segment(net_with(False), max_ops=4).blocks[0].forward) == 2


def test_a_dense_net_is_cut_with_a_larger_boundary():
    """Every op reads all earlier values: no cut is narrow, and none may fail."""
    net = Net()
    made = [net.layer("first", [net.input()], 100)]
    for _ in range(11):
        made.append(net.layer("concatenate", made, 100))
    net.held.add(made[-1])
    net.derive(made[-1])
    chain = segment(net.joint(), max_ops=4)
    validate_chain(chain)
    assert [len(block.forward) for block in chain.blocks] == [3, 4, 5]  # the output is kept: not a real op
    assert len(chain.boundary[1]) == 3


def far_reader_net(**optional) -> tuple[JointGraph, int, int]:
    """A backward op (or an optional op) reads the first value and the last but one of nine."""
    net = Net()
    values = [net.input()]
    for _ in range(9):
        values.append(net.layer("linear", values[-1:], 100))
    net.held.add(values[-1])
    tangent = net.input(100, tangent=True)
    source = [values[1], values[8]]
    if optional:
        source = [net.optional(source, 50, **optional)]
    reader = net.backward([tangent, *source], 100)
    last = net.backward([reader, values[1]], 100)
    net.gradients.add(last)
    return net.joint(), values[1], reader


@pytest.mark.parametrize("optional", [{}, {"time": 1}])
def test_a_value_rides_along_to_the_block_that_needs_it(optional):
    graph, first, reader = far_reader_net(**optional)
    chain = segment(graph, max_ops=3)
    validate_chain(chain)
    assert first not in chain.always
    assert [first in boundary for boundary in chain.boundary] == [False, True, True, False]
    producer = graph.values[reader].producer
    assert [producer in block.backward for block in chain.blocks] == [False, False, True]


@pytest.mark.parametrize(("time", "copies"), [(0, 3), (1000, 0)])
def test_a_cheap_optional_op_is_made_by_each_block_and_a_costly_one_handed_down(time, copies):
    net = Net()
    values = [net.input()]
    mask = net.layer("mask", values, 100)
    for _ in range(9):
        values.append(net.layer("linear", [values[-1], mask], 100))
    net.held.add(values[-1])
    shared = net.optional([mask], 100, time=time)
    gradient = net.input(100, tangent=True)
    for value in reversed(values[1:]):
        gradient = net.backward([gradient, value, shared], 100)
    chain = segment(net.joint(), max_ops=3)
    validate_chain(chain)
    producer = chain.graph.values[shared].producer
    assert sum(producer in block.optional for block in chain.blocks[-3:]) == copies
    assert sum(producer in block.backward for block in chain.blocks) == (copies == 0)
    assert (shared in chain.gradient_boundary[1]) == (copies == 0)


def test_what_is_always_kept():
    net = Net()
    source = net.input()
    once = net.layer("collective", [source], 5000, recomputable=False)
    big = net.layer("linear", [once], 5000)
    tiny = net.layer("statistics", [big], 4)
    released = net.layer("linear", [big, tiny], 5000)
    out = net.layer("linear", [released], 5000)
    net.held.add(out)
    net.derive(out)
    chain = segment(net.joint(released_outputs=frozenset({released})), max_ops=2)
    validate_chain(chain)
    assert chain.always == {once, tiny, out}


@pytest.mark.parametrize(("share", "rebuilt"), [(0.25, True), (1, False)])
def test_a_wide_mask_is_rebuilt_by_each_block_from_a_narrow_one(share, rebuilt):
    net = Net()
    source = net.layer("compare", [net.input()], int(400 * share), saves=False)
    mask = net.layer("where", [source], 400, saves=False, time=1)
    value = net.input()
    for _ in range(12):
        value = net.layer("attention", [value, mask], 4000, time=1000)
    net.held.add(value)
    net.derive(value)
    graph = net.joint()
    chain = segment(graph, max_ops=4)
    validate_chain(chain)
    producer = graph.values[mask].producer
    assert (mask in chain.always) is not rebuilt
    assert (source in chain.always) is rebuilt
    assert chain.rebuilt == (frozenset({producer}) if rebuilt else frozenset())
    assert sum(producer in block.forward for block in chain.blocks) == (len(chain.blocks) if rebuilt else 1)
    assert run_with_forgetting(chain) == set(range(len(graph.ops)))


def test_values_of_a_very_deep_net_are_not_all_tiny():
    graph = transformer(200)
    chain = segment(graph, max_ops=24)
    kept = sum(graph.values[v].bytes for v in chain.always)
    assert kept < 0.05 * sum(v.bytes for v in graph.values if v.producer is not None)
    assert len(chain.blocks) >= 80


def narrowest_placement(graph: JointGraph, chain: Chain) -> int:
    """Least gradient bytes over the only cut of a two-block chain, by trying every placement."""
    ops = [op.id for op in graph.ops if op.phase is Phase.BACKWARD]
    first_block = {v for op in chain.blocks[0].forward for v in graph.ops[op].writes} - chain.boundary[1]
    second_block = {v for op in chain.blocks[1].forward for v in graph.ops[op].writes}
    best = sys.maxsize
    for mask in range(1 << len(ops)):
        late = {op for bit, op in enumerate(ops) if mask >> bit & 1}
        early_reads = {v for op in ops if op not in late for v in graph.ops[op].reads}
        late_reads = {v for op in late for v in graph.ops[op].reads}
        made_late = {v for op in late for v in graph.ops[op].writes}
        if early_reads & (first_block | made_late) or late_reads & second_block:
            continue
        crossing = {v for v in late_reads - made_late if graph.values[v].producer in ops}
        best = min(best, sum(graph.values[v].bytes for v in crossing))
    return best


@examples(40)
@given(st.data())
def test_gradients_handed_down_are_fewest_bytes(data):
    net = Net()
    values = [net.input()]
    for _ in range(5):
        values.append(net.layer("linear", values[-1:], 1000))
    net.held.add(values[-1])
    made = [net.input(10, tangent=True)]
    for _ in range(data.draw(st.integers(1, 8))):
        reads = data.draw(st.sets(st.sampled_from(made), min_size=1, max_size=2))
        reads |= data.draw(st.sets(st.sampled_from([*values[1:5], made[0]]), max_size=1))
        made.append(net.backward(sorted(reads), data.draw(st.sampled_from((10, 200, 3000)))))
    graph = net.joint()
    chain = segment(graph, max_ops=2)
    assert len(chain.blocks) == 2
    assume(len(chain.boundary[1]) == 1)  # no value rides along: the brute force does not know of that
    handed_down = sum(graph.values[v].bytes for v in chain.gradient_boundary[1])
    assert handed_down == narrowest_placement(graph, chain)


@examples(40)
@given(st.dictionaries(st.tuples(*[st.integers(0, 6)] * 2), st.none() | st.integers(1, 5), max_size=24))
def test_minimum_cuts_are_those_of_networkx(edges):
    network = nx.DiGraph()
    network.add_nodes_from(range(7))
    for (tail, head), capacity in edges.items():
        network.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))
    try:
        _, (expected, _) = nx.minimum_cut(network, 0, 6)
    except nx.NetworkXUnbounded:
        assume(False)
    assert source_side(network, 0, 6) == expected


def damaged(chain: Chain) -> dict[str, Chain]:
    """One broken promise each."""
    first, second, *_ = chain.blocks
    moved_forward = dataclasses.replace(first, forward=first.forward[:-1])
    moved = dataclasses.replace(second, backward=(*first.backward, *second.backward))
    swapped = dataclasses.replace(second, forward=second.forward[::-1])
    empty = dataclasses.replace(first, backward=())
    none = frozenset[int]()

    def blocks(*changed: Block) -> Chain:
        return dataclasses.replace(chain, blocks=(*changed, *chain.blocks[len(changed) :]))

    return {
        "stands 0 times": blocks(moved_forward),
        "not available there": blocks(empty, moved),
        "reads value": blocks(first, swapped),
        "stands 2 times": blocks(first, moved),
        "boundary has": dataclasses.replace(chain, boundary=chain.boundary[1:]),
        "must be always saved": dataclasses.replace(chain, always=none),
        "forward op": dataclasses.replace(chain, boundary=(none,) * len(chain.boundary)),
        "do not cross": dataclasses.replace(
            chain, boundary=(none, chain.boundary[1] | chain.boundary[2], *chain.boundary[2:])
        ),
        "gradient boundary": dataclasses.replace(chain, gradient_boundary=(none,) * len(chain.boundary)),
    }


@pytest.mark.parametrize("message", list(damaged(segment(narrow_net(), max_ops=3))))
def test_a_broken_promise_is_named(message):
    chain = segment(narrow_net(), max_ops=3)
    validate_chain(chain)
    with pytest.raises(ValueError, match=message):
        validate_chain(damaged(chain)[message])


def test_block_sizes_follow_the_period():
    assert block_sizes(transformer(12)) == (12, 24)
    assert block_sizes(narrow_net()) == (7,)
    for layers in (2, 40):
        assert all(1 <= size <= 24 for size in block_sizes(transformer(layers)))


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="max_ops must be at least 1, got 0"):
        segment(narrow_net(), max_ops=0)
    with pytest.raises(ValueError, match="no forward op"):
        segment(JointGraph((), ()), max_ops=4)


def test_the_chain_does_not_depend_on_the_hash_seed():
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from support.nets import transformer;"
        "from hybridremat.graph.segmentation.segment import segment; c = segment(transformer(5), max_ops=11);"
        "sys.stdout.write(repr((c.blocks, [sorted(x) for x in c.boundary + c.gradient_boundary])))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, __file__.rpartition("/")[0]],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1

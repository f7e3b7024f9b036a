"""Pins on joint graphs: what a schedule obeys, how one is mended, and that whole plans obey."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase as Stage
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Phase, Schedule, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.pins import Pins, obeys
from hybridremat.graph.segmentation.segment import segment
from hybridremat.graph.segmentation.validate import validate_chain
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.planner import plan_graph
from hybridremat.plans.policy import Pinned
from hybridremat.sequence.decisions import ForwardOption
from hybridremat.sequence.flatten import Flattener
from hybridremat.sequence.repair import PinRepair
from support.examples import examples
from support.joint_graphs import joint_graphs
from support.nets import Net, transformer
from support.pin_oracle import broken_promises


@st.composite
def pinned_graphs(draw: st.DrawFn) -> tuple[JointGraph, Pins]:
    graph = draw(joint_graphs())
    kept, remade = set(), set()
    held = graph.held_outputs | graph.gradients
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            continue
        what = draw(st.integers(0, 3))
        if what == 0:
            kept.add(op.id)
        elif what == 1 and op.recomputable and held.isdisjoint(op.writes):
            remade.add(op.id)
    return graph, Pins(frozenset(kept), frozenset(remade))


def alive(graph: JointGraph) -> set[int]:
    """Ops that the step cannot do without: dead optional ops are none of them."""
    found = {op.id for op in graph.ops if op.phase is not Phase.OPTIONAL or not op.recomputable}
    found |= {op.id for op in graph.ops if graph.gradients & set(op.writes)}
    for op in reversed(graph.ops):
        if op.id in found:
            found |= {made for v in op.reads if (made := graph.values[v].producer) is not None}
    return found


def remade_for_the_backward(graph: JointGraph, pins: Pins) -> set[int]:
    """Remade ops that any step which obeys has to run in the backward, if no optional op runs before."""
    late = {op.id for op in graph.ops if op.phase is not Phase.FORWARD} & alive(graph)
    while True:
        read = {graph.values[v].producer for op in late for v in graph.ops[op].reads}
        if not read & pins.must_recompute - late:
            return late & pins.must_recompute
        late |= read & pins.must_recompute


@examples(150)
@given(pinned_graphs())
def test_a_mended_plain_step_obeys_and_runs_nothing_in_vain(case):
    graph, pins = case
    plain = plain_schedule(graph)
    assert obeys(graph, plain, pins) == (not broken_promises(graph, plain, pins))
    mended = PinRepair(graph, pins)(plain)
    step_memory(graph, mended)  # raises if a value is read before it is made
    assert broken_promises(graph, mended, pins) == []
    assert obeys(graph, mended, pins)
    assert alive(graph) <= set(mended.steps)
    once = {op.id for op in graph.ops if not op.recomputable or op.phase is Phase.BACKWARD} | pins.must_save
    assert all(mended.steps.count(op) <= (1 if op in once else 2) for op in set(mended.steps))
    forward, backward = set(mended.steps[: mended.num_forward]), set(mended.steps[mended.num_forward :])
    if not any(graph.ops[op].phase is Phase.OPTIONAL for op in forward):
        assert backward & pins.must_recompute & alive(graph) == remade_for_the_backward(graph, pins)


@examples(100)
@given(pinned_graphs())
def test_a_mended_step_that_runs_all_twice_obeys(case):
    graph, pins = case
    plain = plain_schedule(graph)
    forward, rest = plain.steps[: plain.num_forward], plain.steps[plain.num_forward :]
    again = tuple(op for op in forward if graph.ops[op].recomputable)
    mended = PinRepair(graph, pins)(Schedule((*forward, *again, *again, *rest), len(forward) + len(again)))
    step_memory(graph, mended)
    assert broken_promises(graph, mended, pins) == []


@examples(60)
@given(pinned_graphs(), st.integers(2, 9))
def test_chains_know_the_pins(case, max_ops):
    graph, pins = case
    chain = segment(graph, max_ops=max_ops, pins=pins)
    validate_chain(chain)
    assert {v for op in pins.must_save for v in graph.ops[op].writes} <= chain.always
    remade = {v for op in pins.must_recompute for v in graph.ops[op].writes}
    assert chain.remade == remade - chain.always - set().union(*chain.boundary)


@examples(80, phases=[Stage.explicit, Stage.reuse, Stage.generate])
@given(pinned_graphs())
def test_every_point_of_a_plan_obeys(case):
    graph, pins = case
    frontier = plan_graph(graph, cache=OptionCache(), workers=1, pinned=Pinned(pins))
    for candidate in frontier.candidates:
        schedule = candidate.schedule
        assert broken_promises(graph, schedule, pins) == []
        assert candidate.peak == step_memory(graph, schedule).peak


def ops_of(graph: JointGraph, target: str) -> frozenset[int]:
    return frozenset(op.id for op in graph.ops if op.target == target)


def planned(graph: JointGraph, pins: Pins):
    return plan_graph(graph, cache=OptionCache(), workers=1, pinned=Pinned(pins)).candidates


def test_a_cheap_pin_costs_its_op_alone_and_keeps_the_frontier_below_plain():
    graph = transformer(4)
    bends = ops_of(graph, "bend")
    free, points = planned(graph, Pins()), planned(graph, Pins(must_recompute=bends))
    extra = sum(graph.ops[op].time for op in bends)
    assert points[-1].time == free[-1].time + extra
    # It is recomputed without a word where memory is short, so the least memory is the same.
    assert points[0].peak == free[0].peak


def deep_net() -> JointGraph:
    """Layers enough, and weights small enough, that at tight limits several layers run again together."""
    net = Net()
    stream = net.layer("embedding", [net.input()], 100, weight=1)
    for _ in range(16):
        wide = net.layer("wide", [stream], 100, time=300, weight=1)
        narrow = net.layer("narrow", [net.layer("bend", [wide], 100, time=300)], 100, time=300, weight=1)
        stream = net.layer("add", [stream, narrow], 100, saves=False)
    loss = net.layer("loss", [stream], 1)
    net.held.add(loss)
    net.derive(loss)
    return net.joint()


def test_what_may_not_wait_for_the_backward_is_saved_only_by_blocks_that_run_again_in_it():
    graph = deep_net()
    pins = Pins(must_recompute=ops_of(graph, "bend"))
    frontier = plan_graph(graph, cache=OptionCache(), workers=1, pinned=Pinned(pins))
    late = 0
    for candidate in frontier.candidates:
        plan = frontier.chains[candidate.chain]
        if candidate.decisions:  # the chain alone sees to it: nothing has to be mended
            flatten = Flattener(plan.chain, plan.bindings, plan.option_sets)
            assert flatten(candidate.decisions) == candidate.schedule
        for decision in candidate.decisions:
            if isinstance(decision, ForwardOption):
                option = plan.option_sets[decision.block].options[decision.option]
                late += plan.bindings[decision.block].problem.rerun_only(option)
    assert late > 0


def test_what_is_kept_is_made_once_at_the_least_memory_too():
    graph = transformer(4)
    wide = frozenset(op.id for op in graph.ops if op.target == "linear" and op.time == 400)
    free, points = planned(graph, Pins()), planned(graph, Pins(must_save=wide))
    assert all(p.schedule.steps.count(op) == 1 for p in points for op in wide)
    assert any(free[0].schedule.steps.count(op) > 1 for op in wide)
    assert free[0].peak < points[0].peak < free[-1].peak


def test_no_cut_where_a_value_to_be_made_again_would_cross():
    graph = transformer(4)
    for target in ("attention", "bend", "normalize"):
        remade = {v for op in ops_of(graph, target) for v in graph.ops[op].writes}
        for size in (3, 7, 12):
            chain = segment(graph, max_ops=size, pins=Pins(must_recompute=ops_of(graph, target)))
            assert remade.isdisjoint(frozenset().union(*chain.boundary))
            assert chain.remade == remade


def test_a_value_that_crosses_all_cuts_is_made_again_all_the_same():
    graph = transformer(3)
    pins = Pins(must_recompute=ops_of(graph, "add"))
    points = planned(graph, pins)
    assert len(points) > 3
    assert not any(broken_promises(graph, p.schedule, pins) for p in points)


def test_an_optional_op_is_kept_though_what_it_is_made_of_is_not():
    net = Net()
    value = net.layer("linear", [net.input()], 100, weight=8)
    far = net.optional([value], 50)
    near = net.optional([far], 10)
    tangent = net.input(8, tangent=True)
    net.held.add(net.layer("loss", [value], 1))
    first = net.backward([tangent, near], 20)
    net.backward([first, far], 8, gradient=True)
    graph = net.joint()
    saved, again = (frozenset({graph.values[value].producer}) for value in (near, far))
    pins = Pins(must_save=saved, must_recompute=again)
    for point in planned(graph, pins):
        assert broken_promises(graph, point.schedule, pins) == []
        assert graph.values[near].producer in point.schedule.steps[: point.schedule.num_forward]


@pytest.mark.parametrize("where", ["boundary", "always"])
def test_a_chain_that_keeps_what_is_to_be_made_again_is_refused(where):
    chain = segment(transformer(3), max_ops=4)
    kept = chain.always if where == "always" else chain.boundary[1]
    with pytest.raises(ValueError, match="are to be made again, but the chain keeps them"):
        validate_chain(replace(chain, remade=frozenset(sorted(kept)[:1])))

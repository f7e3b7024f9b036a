"""The checker against real execution: what is valid passes, what computes other numbers does not."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from torch import fx

from hybridremat.compiler.check import check
from hybridremat.compiler.emit import emit
from hybridremat.compiler.rng_replay import replay
from hybridremat.errors import PlanError
from hybridremat.graph.joint import Phase, Schedule, plain_schedule
from hybridremat.graph.memory import ScheduleError, step_memory
from hybridremat.graph.private_torch import run_and_save_rng_state
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload.moved import unmoved
from hybridremat.sequence.offload.placement import place
from support.examples import examples
from support.moves import emitted_with_moves
from support.training import small, traced

# An example costs a tenth of a second: none is made smaller when it fails.
EXAMPLES = {
    "phases": (Stage.explicit, Stage.generate),
    "suppress_health_check": (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
}
MODELS = ("mlp", "convnet", "transformer", "running")


@cache
def step_of(name):
    model, batch = small(name)
    return traced(model, **batch)


# Valid schedules


def readings(graph, steps):
    """For every execution: the executions whose versions it reads."""
    latest, found = {}, []
    for now, op in enumerate(steps):
        found.append([latest[v] for v in graph.ops[op].reads if v in latest])
        latest.update(dict.fromkeys(graph.ops[op].writes, now))
    return found, latest


def without_dead(graph, steps, num_forward):
    """Drop executions that nothing needs: their versions are read by nobody and returned to nobody."""
    reads, last = readings(graph, steps)
    first = {}
    for now, op in enumerate(steps):
        for value in graph.ops[op].writes:
            first.setdefault(value, now)
    pending = [last[v] for v in graph.gradients if v in last]
    pending += [first[v] for v in graph.held_outputs | graph.released_outputs]
    pending += [t for t, op in enumerate(steps) if graph.ops[op].mutates]
    pending += [steps.index(op.id) for op in graph.ops if op.random and op.phase is Phase.FORWARD]
    alive = set()
    while pending:
        now = pending.pop()
        if now not in alive:
            alive.add(now)
            pending += reads[now]
    kept = [t for t in range(len(steps)) if t in alive]
    return Schedule(tuple(steps[t] for t in kept), sum(t < num_forward for t in kept))


@st.composite
def schedules(draw, graph):
    """Optional ops in either phase, recomputations anywhere after the first run; then no dead ones."""
    plain = plain_schedule(graph)
    forward, backward = list(plain.steps[: plain.num_forward]), list(plain.steps[plain.num_forward :])
    for op in [op for op in backward if graph.ops[op].phase is Phase.OPTIONAL]:
        ready = all(graph.producer(v) is None or graph.producer(v).id in forward for v in graph.ops[op].reads)
        if ready and draw(st.booleans()):
            backward.remove(op)
            forward.append(op)
    steps, split = forward + backward, len(forward)
    again = [op.id for op in graph.ops if op.recomputable and op.phase is not Phase.BACKWARD]
    overwritten = {v for op in graph.ops if op.mutates for v in op.reads if graph.values[v].producer is None}
    for _ in range(draw(st.integers(0, 25))):
        op = draw(st.sampled_from(again))
        # a normalization runs again in the backward only: its statistics are being updated in the forward
        low = split if overwritten.intersection(graph.ops[op].reads) else steps.index(op) + 1
        where = draw(st.integers(low, len(steps)))
        split += where < split
        steps.insert(where, op)
    return without_dead(graph, steps, split)


@st.composite
def perhaps_moved(draw, graph):
    """A schedule, and of every second one some of what waits for the backward in a file meanwhile."""
    schedule = draw(schedules(graph))
    if draw(st.booleans()):
        return schedule
    bare = unmoved(Judge(graph), schedule)
    stays = [(each.value, each.birth) for each in bare.waiting if draw(st.booleans())]
    limit = int(draw(st.floats(0.4, 1.0)) * step_memory(graph, schedule).peak)
    return replace(schedule, moves=place(bare, limit, stays) or ())


# Execution


def real_inputs(step, seed):
    """Random tensors for the placeholders of the joint graph."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for node in step.module.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        if not fake.dtype.is_floating_point:
            inputs[node.name] = torch.zeros(fake.shape, dtype=fake.dtype)
        else:
            drawn = torch.rand(fake.shape, generator=generator, dtype=fake.dtype) + 0.5
            inputs[node.name] = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(drawn)
    return inputs


def flat(results):
    return [item for item in results if isinstance(item, torch.Tensor)]


def run_graph(module, inputs):
    results = fx.Interpreter(module).run(*inputs, enable_io_processing=False)
    return torch.utils._pytree.tree_leaves(results)


def run_joint(step, seed=0):
    inputs = real_inputs(step, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        results = run_graph(step.module, list(inputs.values()))
    return [*flat(results), *inputs.values(), torch.get_rng_state()]


def run_emitted(step, forward, backward, seed=0):
    inputs = real_inputs(step, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        taken = [inputs[n.name] for n in forward.graph.find_nodes(op="placeholder")]
        results = run_graph(forward, taken)
        saved = results[step.num_outputs :]
        names = [n.name for n in backward.graph.find_nodes(op="placeholder")]
        tangents = [inputs[name] for name in names if name.startswith("tangents_")]
        gradients = run_graph(backward, [*saved, *tangents])
    return [*flat(results[: step.num_outputs]), *flat(gradients), *inputs.values(), torch.get_rng_state()]


def same(first, second):
    """Bit for bit; NaN equals NaN."""
    if len(first) != len(second):
        return False
    return all(
        a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(first, second, strict=True)
    )


@cache
def expected(name):
    return run_joint(step_of(name))


@pytest.mark.parametrize("name", MODELS)
@examples(15, **EXAMPLES)
@given(data=st.data())
def test_valid_schedules_pass_compute_the_same_and_need_what_the_replay_says(name, data):
    step = step_of(name)
    schedule = data.draw(perhaps_moved(step.graph))
    forward, backward = emitted_with_moves(step, schedule)
    counted, host = step_memory(step.graph, schedule), Judge(step.graph).host_bytes(schedule)
    peak = counted.peak
    found = check(step, forward, backward, limit=peak)
    assert (found.peak, found.saved, found.host) == (peak, counted.saved + counted.released, host)
    assert same(expected(name), run_emitted(step, forward, backward))
    with pytest.raises(PlanError, match=f"peak of {peak} bytes passes the limit of {peak - 1} bytes"):
        check(step, forward, backward, limit=peak - 1)


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_agree(name):
    step = step_of(name)
    schedule = plain_schedule(step.graph)
    saved = check(step, *emit(step, schedule)).saved
    released = sum(step.graph.values[v].bytes for v in step.graph.released_outputs)
    assert saved - released <= step_memory(step.graph, schedule).saved <= saved


# Damage of any kind: whatever then computes other numbers, or cannot run, is refused


def calls(module):
    return [node for node in module.graph.nodes if node.op == "call_function"]


def shape_of(node):
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def replace_input(data, module):
    node = data.draw(st.sampled_from([n for n in calls(module) if n.all_input_nodes]))
    old = data.draw(st.sampled_from(node.all_input_nodes))
    earlier = []
    for other in module.graph.nodes:
        if other is node:
            break
        if other is not old and shape_of(other) is not None and shape_of(other) == shape_of(old):
            earlier.append(other)
    assume(earlier)
    node.replace_input_with(old, data.draw(st.sampled_from(earlier)))


def skip_node(data, module):
    fitting = [
        (n, s) for n in calls(module) for s in n.all_input_nodes if shape_of(n) and shape_of(n) == shape_of(s)
    ]
    assume(fitting)
    node, source = data.draw(st.sampled_from(fitting))
    node.replace_all_uses_with(source)
    module.graph.erase_node(node)


def change_constant(data, module):
    places = [
        (n, i)
        for n in calls(module)
        for i, a in enumerate(n.args)
        if isinstance(a, (float, bool)) and n.users
    ]
    assume(places)
    node, index = data.draw(st.sampled_from(places))
    old = node.args[index]
    node.update_arg(index, (not old) if isinstance(old, bool) else old * 0.5 + 0.25)


def move_call(data, module):
    nodes = list(module.graph.nodes)
    node = data.draw(st.sampled_from(calls(module)))
    low = max((nodes.index(s) for s in node.all_input_nodes), default=0)
    high = min((nodes.index(u) for u in node.users), default=len(nodes) - 1)
    places = [n for n in nodes[low + 1 : high] if n is not node and n.op == "call_function"]
    assume(places)
    data.draw(st.sampled_from(places)).append(node)


def repeat_call(data, module):
    node = data.draw(st.sampled_from(calls(module)))
    with module.graph.inserting_after(node):
        module.graph.node_copy(node, lambda source: source)


def exchange_outputs(data, module):
    output = next(iter(module.graph.find_nodes(op="output")))
    results = list(torch.utils._pytree.tree_leaves(output.args[0]))
    places = [i for i, r in enumerate(results) if isinstance(r, fx.Node)]
    pairs = [(i, j) for i in places for j in places if i < j and shape_of(results[i]) == shape_of(results[j])]
    assume(pairs)
    i, j = data.draw(st.sampled_from(pairs))
    results[i], results[j] = results[j], results[i]
    output.args = (tuple(results),)


DAMAGES = (replace_input, skip_node, change_constant, move_call, repeat_call, exchange_outputs)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", MODELS)
@examples(15, **EXAMPLES)
@given(data=st.data())
def test_whatever_computes_other_numbers_is_refused(name, damage, data):
    step = step_of(name)
    forward, backward = emitted_with_moves(step, data.draw(perhaps_moved(step.graph)))
    damage(data, forward if data.draw(st.booleans()) else backward)
    try:
        check(step, forward, backward)
    except PlanError:
        return
    assert same(expected(name), run_emitted(step, forward, backward))


# Each kind of damage with its text


def twice(graph, *ops):
    """The plain schedule with these ops run again at the start of the backward."""
    plain = plain_schedule(graph)
    steps = (*plain.steps[: plain.num_forward], *ops, *plain.steps[plain.num_forward :])
    return without_dead(graph, list(steps), plain.num_forward)


def recomputable_after(graph, op):
    return [o.id for o in graph.ops if o.phase is Phase.FORWARD and o.recomputable and o.id > op]


def random_ops(graph):
    return [op.id for op in graph.ops if op.random]


def replays(module):
    return [node for node in module.graph.nodes if node.target is replay]


def replayed(name):
    step = step_of(name)
    forward, backward = emit(step, twice(step.graph, *random_ops(step.graph)))
    assert len(replays(backward)) >= 2
    check(step, forward, backward)
    return step, forward, backward


def test_a_dropped_op_is_refused():
    step = step_of("mlp")
    forward, backward = emit(step, plain_schedule(step.graph))
    node = next(n for n in calls(forward) if n.name.startswith("mul"))
    node.replace_all_uses_with(node.args[0])
    with pytest.raises(PlanError, match="a forward output is not computed as in the joint graph"):
        check(step, forward, backward)


class Alike(torch.nn.Module):
    """Two outputs that are computed alike, and a view of each."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        h = self.layer(x)
        first, second = h * 3, h * 3
        return first, second, first.t(), second.t(), (h * 3).sum()


@pytest.mark.parametrize("held", [False, True])
def test_outputs_that_are_computed_alike_stay_apart(held):
    step = traced(Alike(), x=torch.randn(4, 8), hold_outputs=held)
    schedule = plain_schedule(step.graph)
    forward, backward = emit(step, schedule)
    assert check(step, forward, backward).peak == step_memory(step.graph, schedule).peak
    output = forward.graph.output_node()
    first, second, *others = output.args[0]
    assert first is not second
    output.args = ((first, first, *others),)
    with pytest.raises(PlanError, match="returned as two outputs"):
        check(step, forward, backward)


def test_a_dropped_backward_op_is_refused():
    step = step_of("mlp")
    forward, backward = emit(step, plain_schedule(step.graph))
    node = [n for n in calls(backward) if n.name.startswith("mul")][-1]
    node.replace_all_uses_with(node.args[0])
    with pytest.raises(PlanError, match="a gradient is not computed as in the joint graph"):
        check(step, forward, backward)


def test_a_replay_with_the_state_of_another_draw_is_refused():
    step, forward, backward = replayed("transformer")
    first, second = replays(backward)[:2]
    one, other = first.args[0], second.args[0]
    first.update_arg(0, other)
    second.update_arg(0, one)
    with pytest.raises(PlanError, match="replays another random call than the one whose state it reads"):
        check(step, forward, backward)


def test_a_second_draw_in_the_backward_is_refused():
    step, forward, backward = replayed("transformer")
    node = replays(backward)[0]
    with backward.graph.inserting_before(node):
        again = backward.graph.call_function(node.args[1], node.args[2:], node.kwargs)
    again.meta = dict(node.meta)
    node.replace_all_uses_with(again)
    with pytest.raises(PlanError, match=r"a gradient is not computed|not drawn in the order"):
        check(step, forward, backward)


def test_a_draw_that_nobody_uses_is_refused():
    step, forward, backward = replayed("transformer")
    node = replays(backward)[0]
    with backward.graph.inserting_before(node):
        backward.graph.call_function(node.args[1], node.args[2:], node.kwargs)
    with pytest.raises(PlanError, match="random numbers are not drawn in the order of the joint graph"):
        check(step, forward, backward)


def updates(module):
    return [n for n in calls(module) if n.target is torch.ops.aten.copy_.default]


@pytest.mark.parametrize("name", ["convnet", "running"])
def test_an_update_that_is_left_out_is_refused(name):
    step = step_of(name)
    forward, backward = emit(step, plain_schedule(step.graph))
    assert updates(forward) and not updates(backward)
    forward.graph.erase_node(updates(forward)[0])
    with pytest.raises(PlanError, match="an in-place update or an assert is missing, repeated or different"):
        check(step, forward, backward)


@pytest.mark.parametrize("name", ["convnet", "running"])
def test_an_update_that_is_repeated_is_refused(name):
    step = step_of(name)
    forward, backward = emit(step, plain_schedule(step.graph))
    with forward.graph.inserting_after(updates(forward)[0]):
        forward.graph.node_copy(updates(forward)[0], lambda source: source)
    with pytest.raises(PlanError, match=r"update or an assert is missing, repeated or different|overwritten"):
        check(step, forward, backward)


def carry(forward, backward, nodes):
    """Save more forward nodes; the placeholders that they arrive as in the backward."""
    output = next(iter(forward.graph.find_nodes(op="output")))
    output.args = ((*output.args[0], *nodes),)
    places = backward.graph.find_nodes(op="placeholder")
    tangent = next(n for n in places if n.name.startswith("tangents_"))
    arrived = []
    for node in nodes:
        with backward.graph.inserting_before(tangent):
            arrived.append(backward.graph.placeholder(f"carried_{node.name}"))
        arrived[-1].meta = dict(node.meta)
    return arrived


@pytest.mark.parametrize("keep", [True, False], ids=["repeated", "moved"])
def test_an_update_in_the_backward_is_refused(keep):
    step = step_of("convnet")
    forward, backward = emit(step, plain_schedule(step.graph))
    update = updates(forward)[0]
    arrived = carry(forward, backward, list(update.args))
    output = next(iter(backward.graph.find_nodes(op="output")))
    with backward.graph.inserting_before(output):
        backward.graph.call_function(update.target, tuple(arrived))
    if not keep:
        forward.graph.erase_node(update)
    with pytest.raises(PlanError, match="in-place update"):
        check(step, forward, backward)


def test_a_changed_constant_is_refused():
    step = step_of("mlp")
    forward, backward = emit(step, plain_schedule(step.graph))
    node = next(n for n in calls(forward) if 1.5 in n.args)
    node.args = tuple(1.25 if a == 1.5 else a for a in node.args)
    with pytest.raises(PlanError, match="is not computed as in the joint graph"):
        check(step, forward, backward)


def test_an_overwritten_buffer_is_not_read_in_the_backward():
    step = step_of("running")
    once = [op.id for op in step.graph.ops if not op.recomputable and not op.mutates]
    again = {op: twice(step.graph, op, *recomputable_after(step.graph, op)) for op in once}
    again = [schedule for op, schedule in again.items() if schedule.steps.count(op) == 2]
    assert len(again) >= 2
    for schedule in again:
        forward, backward = emit(step, schedule)
        with pytest.raises(PlanError, match="which the forward has overwritten"):
            check(step, forward, backward)


def test_an_update_before_a_read_of_the_old_buffer_is_refused():
    step = step_of("running")
    plain = plain_schedule(step.graph)
    reader = next(op.id for op in step.graph.ops if not op.recomputable and not op.mutates)
    again = (reader, *recomputable_after(step.graph, reader))
    steps = (*plain.steps[: plain.num_forward], *again, *plain.steps[plain.num_forward :])
    forward, backward = emit(step, Schedule(steps, plain.num_forward + len(again)))
    with pytest.raises(PlanError, match="which the forward has overwritten"):
        check(step, forward, backward)


def test_schedules_that_read_what_is_not_there_are_refused():
    step = step_of("mlp")
    plain = plain_schedule(step.graph)
    with pytest.raises(ScheduleError, match="was not computed before"):
        step_memory(step.graph, Schedule(plain.steps[1:], plain.num_forward - 1))


def test_random_ops_run_once_without_saved_state():
    step = step_of("transformer")
    forward, backward = emit(step, plain_schedule(step.graph))
    targets = Counter(n.target for m in (forward, backward) for n in m.graph.nodes)
    assert not targets[run_and_save_rng_state] and not targets[replay]
    assert targets[operator.getitem]

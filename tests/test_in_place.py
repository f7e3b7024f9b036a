"""Results written over inputs: the trials, the checker, and blocks of such ops against brute force."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import nn

import hybridremat
from hybridremat.blocks.pareto import enumerate_options
from hybridremat.blocks.problem import bind_block
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import BlockProblem
from hybridremat.compiler.check import check
from hybridremat.compiler.emit import emit
from hybridremat.errors import LimitError, PlanError
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.joint import Phase, Schedule, as_plain, plain_schedule
from hybridremat.graph.memory import MemorySimulator, step_memory
from hybridremat.graph.rewrites import in_place
from hybridremat.graph.segmentation.segment import segment
from support.brute_blocks import SWEEPS, blocks, brute_force, figures, frontier
from support.examples import examples
from support.training import small, traced
from support.wrapping import HOW

RANDOM = examples(60, suppress_health_check=list(HealthCheck))
ATEN = torch.ops.aten


class Chain(nn.Module):
    """Elementwise ops in a row, each of which may write over its input, between two products."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = self.first(x)
        x = (x * 2 + 1).tanh().abs().sqrt()
        return self.last(x).log_softmax(-1).sum()


@cache
def chain():
    return traced(Chain(), torch.randn(8, 16))


def emitted(step):
    return emit(step, plain_schedule(step.graph))


def in_place_calls(module):
    return [n for n in module.graph.nodes if n.op == "call_function" and n.target._schema.is_mutable]


# Trials


def candidates(step, store):
    graph = in_place.IN_PLACE.applied(step, store).graph
    return {op.name: op.overwrites for op in graph.ops if op.overwrites}


def test_ops_may_overwrite_what_a_trial_allows():
    step, store = chain(), KernelStore()
    found = candidates(step, store)
    assert {"add", "abs_1", "sqrt", "_log_softmax"} <= found.keys()
    assert all(step.graph.values[v].producer is not None for over in found.values() for v in over)
    assert not any("mm" in name for name in found)  # products would compute wrong numbers


class Symmetric(Chain):
    """Reads one tensor twice, once with its rows as columns."""

    def forward(self, x):
        x = self.first(x)
        return self.last(x + x.t()).sum()


def test_what_a_kernel_reads_in_two_ways_is_not_overwritten():
    """Its trial is on two tensors, and would pass."""
    assert "add" not in candidates(traced(Symmetric(), torch.randn(16, 16)), KernelStore())


def product_over_either_input_is_wrong(width):
    """Whether this CPU's product, which may pack or read all of its inputs first, cannot overwrite one."""
    left, right = torch.randn(2, width, width)
    over_left, over_right = left.clone(), right.clone()
    torch.mm(over_left, right, out=over_left)
    torch.mm(left, over_right, out=over_right)
    return not any(torch.equal(found, left @ right) for found in (over_left, over_right))


def test_a_form_that_gives_other_bits_is_not_used(monkeypatch):
    """A product that overwrites its own input, which PyTorch accepts."""
    monkeypatch.setattr(in_place, "_WITH_OUT", frozenset({"mm.default"}))
    monkeypatch.setattr(in_place, "_FIRST_ARGUMENT", frozenset())
    in_place.in_place_form.cache_clear()
    try:
        assert in_place.in_place_form(ATEN.mm.default).target == ATEN.mm.out
        width = next(filter(product_over_either_input_is_wrong, (16, 48, 64, 96, 128)))
        model = nn.Sequential(nn.Linear(width, width, bias=False), Chain(width))
        step = traced(model, torch.randn(width, width))
        assert any(list(in_place.overwritable(step, op.id)) for op in step.graph.ops)
        assert candidates(step, KernelStore()) == {}
    finally:
        in_place.in_place_form.cache_clear()


def test_a_form_that_allocates_is_not_used(monkeypatch):
    """``relu.out`` makes a tensor of its own first."""
    monkeypatch.setattr(in_place, "_WITH_OUT", frozenset({"relu.default"}))
    monkeypatch.setattr(in_place, "_FIRST_ARGUMENT", frozenset())
    in_place.in_place_form.cache_clear()
    try:
        assert in_place.in_place_form(ATEN.relu.default).target == ATEN.relu.out
        step = traced(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Chain()), torch.randn(8, 16))
        assert candidates(step, KernelStore()) == {}
    finally:
        in_place.in_place_form.cache_clear()


def test_trials_are_kept(tmp_path, monkeypatch):
    store = KernelStore(tmp_path / "kernels.json")
    found = candidates(chain(), store)
    store.save()
    again = KernelStore(tmp_path / "kernels.json")
    monkeypatch.setattr(in_place, "tried", lambda *_: pytest.fail("tried again"))
    assert candidates(chain(), again) == found


@RANDOM
@given(data=st.data())
def test_every_form_gives_the_bits_of_its_op(data):
    """On random shapes and types, for all ops of the table: what a trial allows is equal on other numbers."""
    names = sorted(n for n in in_place._WITH_OUT | in_place._FIRST_ARGUMENT if n in CALLS)
    name = data.draw(st.sampled_from(names))
    packet, overload = name.split(".")
    plain = getattr(getattr(ATEN, packet), overload)
    form = in_place.in_place_form(plain)
    shape = data.draw(st.sampled_from([(7,), (4, 33), (2, 3, 65), (5, 1024)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    if name == "mul.Scalar" and dtype == torch.bfloat16:
        return  # a trial refuses it: other bits
    args = CALLS[name](lambda: torch.randn(shape).mul_(3).to(dtype))
    expected = plain(*args)
    over = args[0]
    result = form.target(*args, **form.keywords({}, over))
    assert result is over
    assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8)), name


def _binary(make):
    return make(), make()


CALLS = {
    **{f"{n}.Tensor": _binary for n in ("add", "sub", "mul", "div")},
    **{f"{n}.default": _binary for n in ("maximum", "minimum", "atan2", "tanh_backward", "sigmoid_backward")},
    **{f"{n}.default": lambda make: (make(),) for n in ("exp", "tanh", "sigmoid", "relu", "gelu", "silu")},
    **{f"{n}.default": lambda make: (make(),) for n in ("abs", "neg", "rsqrt", "sqrt", "erf", "sin", "cos")},
    **{f"{n}_backward.default": _binary for n in ("gelu", "silu")},
    **{f"{n}.Scalar": lambda make: (make(), 1.7) for n in ("add", "sub", "mul", "div")},
    "threshold_backward.default": lambda make: (make(), make(), 0),
    "pow.Tensor_Scalar": lambda make: (make(), 2),
    "_softmax.default": lambda make: (make(), -1, False),
    "_log_softmax.default": lambda make: (make(), -1, False),
    "masked_fill.Scalar": lambda make: (t := make(), t > 0, -1.0),
}


def test_looking_for_forms_leaves_the_ops_as_they_are():
    """Compilers tell ops apart by identity: an op that is made anew is no longer theirs."""
    before = {name: _plain(name) for name in in_place._WITH_OUT | in_place._FIRST_ARGUMENT}
    in_place.in_place_form.cache_clear()
    assert all(in_place.in_place_form(op) is not None for op in before.values())
    assert all(_plain(name) is op for name, op in before.items())


def _plain(name):
    packet, overload = name.split(".")
    return getattr(getattr(ATEN, packet), overload)


# What the checker refuses


def first_call(module):
    return in_place_calls(module)[0]


def test_emitted_graphs_overwrite_and_pass():
    step = chain()
    forward, backward = emitted(step)
    assert len(in_place_calls(forward)) >= 2 and in_place_calls(backward)
    memory, schedule = check(step, forward, backward), plain_schedule(step.graph)
    counted, plain = step_memory(step.graph, schedule), step_memory(as_plain(step.graph), schedule)
    assert memory.peak == counted.peak
    assert memory.forward_peak == max(counted.profile[: schedule.num_forward])
    saved = [more - less for less, more in zip(counted.profile, plain.profile, strict=True)]
    assert min(saved) == 0 and sum(saved) == 512 * len(MemorySimulator(step.graph).overwritten(schedule))


def test_a_read_of_what_was_written_over_is_refused():
    step = chain()
    forward, backward = emitted(step)
    call = first_call(forward)
    gone = call.all_input_nodes[0]
    with forward.graph.inserting_after(call):
        late = forward.graph.call_function(ATEN.neg.default, (gone,))
        late.meta["val"] = gone.meta["val"]
    late.name = "late"
    with pytest.raises(PlanError, match=f"reads {gone.name}, which has been written over"):
        check(step, forward, backward)


def test_a_read_through_a_view_is_refused():
    step = chain()
    forward, backward = emitted(step)
    call = first_call(forward)
    gone = call.all_input_nodes[0]
    with forward.graph.inserting_before(call):
        view = forward.graph.call_function(ATEN.view.default, (gone, [-1]))
    with forward.graph.inserting_after(call):
        forward.graph.call_function(ATEN.neg.default, (view,))
    with pytest.raises(PlanError, match=f"reads {view.name}, which has been written over"):
        check(step, forward, backward)


@pytest.mark.parametrize("given", ["parameter", "tangent", "output"])
def test_what_is_not_the_steps_own_is_never_written_over(given):
    step = traced(WithOutput(), torch.randn(16, 16), hold_outputs=False)
    forward, backward = emitted(step)
    module = forward if given == "parameter" else backward
    call = next(n for n in in_place_calls(module) if {"out", "grad_input"} & n.kwargs.keys())
    (name,) = {"out", "grad_input"} & call.kwargs.keys()
    inputs = [n for n in module.graph.find_nodes(op="placeholder") if n.meta["val"].shape == (16, 16)]
    if given == "output":
        returned = {n.name for n in next(iter(forward.graph.find_nodes(op="output"))).args[0][:2]}
        inputs = [n for n in inputs if n.name in returned]
    elif given == "tangent":
        inputs = [n for n in inputs if n.name.startswith("tangents_")]
    call.kwargs = {**call.kwargs, name: inputs[0]}
    with pytest.raises(PlanError, match=f"{call.name} writes over what is not the step's own"):
        check(step, forward, backward)


class WithOutput(nn.Module):
    """Returns what its backward reads."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        hidden = (self.first(x) * 2 + 1).tanh()
        return self.last(hidden.abs().sqrt()).log_softmax(-1), hidden


def test_an_update_in_place_of_another_op_is_refused():
    """Of an op whose inputs must not be overwritten while it runs."""
    step = traced(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), Chain()), torch.randn(16, 16))
    forward, backward = emitted(step)
    product = [n for n in forward.graph.nodes if n.target is ATEN.addmm.default][1]
    source = next(n for n in product.args if n.op == "call_function")
    product.target, product.kwargs = ATEN.addmm.out, {"out": source}
    with pytest.raises(PlanError):
        check(step, forward, backward)


def test_what_is_laid_out_in_another_way_is_not_written_over():
    step = chain()
    forward, backward = emitted(step)
    call = first_call(forward)
    gone = call.all_input_nodes[0]
    gone.meta["val"] = gone.meta["val"].t()
    with pytest.raises(PlanError, match=f"{call.name} is not laid out as {gone.name}"):
        check(step, forward, backward)


def test_a_plan_that_overwrites_what_it_cannot_is_refused():
    """As an edited plan file could let it: a product must not overwrite an input that dies with it."""
    step = traced(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.0), Chain()), torch.randn(16, 16))
    ops = list(step.graph.ops)
    (op, value), *_ = (
        (op, v)
        for op in ops
        for v in op.reads
        if op.target.startswith("aten.addmm") and step.graph.values[v].producer is not None
    )
    ops[op.id] = replace(op, overwrites=(value,))
    forward = [op.id for op in ops if op.phase is Phase.FORWARD]
    backward = [op.id for op in ops if op.phase is not Phase.FORWARD]
    graph = replace(step.graph, ops=tuple(ops))
    twice = Schedule((*forward, *forward, *backward), len(forward))
    schedule = next(s for s in (plain_schedule(graph), twice) if value in overwritten_values(graph, s))
    with pytest.raises(PlanError, match="overwrite what it cannot"):
        emit(replace(step, graph=graph), schedule)


def overwritten_values(graph, schedule):
    return set(MemorySimulator(graph).overwritten(schedule).values())


# Blocks


@st.composite
def overwriting_blocks(draw: st.DrawFn) -> BlockProblem:
    """A block some of whose ops may overwrite what they read, which is then not saved."""
    problem = draw(blocks())
    sizes, ops, barred = list(problem.value_bytes), list(problem.ops), set()
    for c, op in enumerate(ops):
        free = [d for d in op.reads if d not in problem.outputs]
        if len(op.writes) == 1 and free and draw(st.booleans()):
            over = tuple(draw(st.permutations(free)))
            over = tuple(d for d in over if sizes[d] == sizes[over[0]])
            sizes[op.writes[0]] = sizes[over[0]]
            ops[c], barred = replace(op, overwrites=over), barred | set(over)
    return replace(problem, value_bytes=tuple(sizes), ops=tuple(ops), never_saved=frozenset(barred))


@pytest.mark.parametrize("name", ["chain", "mlp"])
def test_a_block_counts_its_backward_as_the_replay_of_the_step_does(name):
    """Of one block that is the whole step, all saved: what is alive anyway is on top."""
    model, batch = small("mlp")
    step = chain() if name == "chain" else traced(model, **batch)
    block = segment(step.graph, max_ops=len(step.graph.ops))
    assert len(block.blocks) == 1
    graph, binding = block.graph, bind_block(block, 0)
    problem = binding.problem
    optional = [c for c, op in enumerate(problem.ops) if op.optional]
    option = simulate_option(problem, range(len(problem.value_bytes)), optional, [()] * len(problem.steps))
    forward = sorted(op.id for op in graph.ops if op.phase is not Phase.BACKWARD)
    schedule = Schedule((*forward, *(op for ops in binding.steps for op in ops)), len(forward))
    profile = step_memory(graph, schedule).profile
    anyway = sum(graph.values[value].bytes for value in block.always)
    anyway += sum(value.bytes for value in graph.values if value.tangent)
    assert max(profile[len(forward) :]) == option.backward_peak + anyway
    over = MemorySimulator(graph).overwritten(schedule)
    saved = {value for op in forward for value in graph.ops[op].writes}
    found = any(value in saved for now, value in over.items() if now >= len(forward))
    assert found == (name == "chain")


@RANDOM
@given(problem=overwriting_blocks())
def test_blocks_with_ops_that_overwrite_are_solved_to_the_optimum(problem):
    best = frontier(brute_force(problem, solo=False, copies=3, idle=problem.never_saved))
    if not best:
        return
    found = enumerate_options(problem, SWEEPS)
    mine = figures(tuple(o for o in found.options if not problem.rerun_only(o)))
    most = max(peak for _, peak, _ in mine)
    assert frontier(mine) == {p for p in best if p[1] <= most}


@RANDOM
@given(problem=overwriting_blocks())
def test_what_may_be_saved_too_is_never_counted_too_low(problem):
    problem = replace(problem, never_saved=frozenset())
    every = brute_force(problem, solo=False, copies=3)
    if every:
        assert figures(enumerate_options(problem, SWEEPS).options) <= every


# Users


def test_rewrites_can_be_switched_off():
    model, batch = Chain(64), {"x": torch.randn(256, 64)}
    none = hybridremat.frontier(model, kwargs=batch, rewrites="none", **HOW)
    exact = hybridremat.frontier(model, kwargs=batch, **HOW)
    assert exact.least.peak < none.least.peak and exact.plain_peak == none.plain_peak
    for point in none.points:  # at every limit, no slower
        assert exact.at(memory_limit=point.peak).overhead <= point.overhead + 1e-9
    with pytest.raises(LimitError, match="rewrites='fast' is not known; use 'exact' or 'chunked' or 'none'"):
        hybridremat.frontier(model, kwargs=batch, rewrites="fast", **HOW)


def test_plans_say_what_is_written_in_place(tmp_path):
    model, batch = Chain(64), {"x": torch.randn(256, 64)}
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="85%", **HOW)
    graph, steps = plan.details.graph, plan.schedule.steps
    calls = Counter(steps[now] for now in MemorySimulator(graph).overwritten(plan.schedule))
    assert f"{sum(calls.values())} of {len(steps)} kernel calls write over" in str(plan)
    explained = [each for index in range(len(plan.blocks)) for each in plan.inspect(index).values]
    shown = {each.value.name: each.in_place for each in explained}
    expected = {graph.values[op.writes[0]].name: calls[op.id] for op in graph.ops if len(op.writes) == 1}
    assert shown == {name: expected.get(name, 0) for name in shown}
    assert any(shown.values()) and "tanh, in place" in str(plan.inspect(0))
    plan.save(tmp_path / "p.json")
    assert str(hybridremat.Plan.load(tmp_path / "p.json").inspect(0)) == str(plan.inspect(0))
    plain = hybridremat.plan(model, kwargs=batch, memory_limit="85%", rewrites="none", **HOW)
    assert "in place" not in str(plain) + str(plain.inspect(0))


def test_a_plan_file_brings_its_rewrites(tmp_path):
    model, batch, path = Chain(64), {"x": torch.randn(256, 64)}, tmp_path / "p.json"
    hybridremat.plan(model, kwargs=batch, memory_limit="85%", rewrites="none", **HOW).save(path)
    hybridremat.wrap(model, kwargs=batch, plan=path, **HOW)
    assert hybridremat.get_plan(model).request.rewrites == "none"
    hybridremat.unwrap(model)
    hybridremat.plan(model, kwargs=batch, memory_limit="85%", **HOW).save(path)
    with pytest.raises(LimitError, match="rewrites='none' beside plan=, which was made with"):
        hybridremat.wrap(model, kwargs=batch, plan=path, rewrites="none", **HOW)


def test_a_second_backward_through_a_retained_graph_gives_the_same_gradients():
    """What is written over in the backward is copied first."""
    torch.manual_seed(0)
    model, batch = Chain(64), {"x": torch.randn(256, 64)}
    hybridremat.wrap(model, kwargs=batch, memory_limit="85%", **HOW)
    loss = model(**batch)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, once) for p, once in zip(model.parameters(), first, strict=True))

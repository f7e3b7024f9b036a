"""The replay of generated code, fusion and late recomputation, by hand and without a compiler."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from hybridremat.compiler.emit import emit
from hybridremat.compiler.inductor import as_allocated
from hybridremat.compiler.lowered_memory import replay
from hybridremat.graph.generated_code import OP, BufferEvent, LoweredCode, Result
from hybridremat.graph.joint import Phase, Schedule, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.private_inductor import InductorFusion
from hybridremat.graph.tracing.fusion import find_fusion
from hybridremat.graph.tracing.fx_nodes import is_random
from hybridremat.sequence.sinking import sink_recomputations
from support.examples import examples
from support.extreme_schedules import extreme_schedule
from support.nets import transformer
from support.training import traced


def peak(*events, given=(), workspace=0, **how):
    return replay(events, dict(given), lambda _: workspace, **how)


def alloc(name, size):
    return BufferEvent("alloc", name, size)


def free(name):
    return BufferEvent("free", name)


def move(source, name):
    return BufferEvent("move", name, source=source)


def alias(source, name):
    return BufferEvent("alias", name, source=source)


def test_buffers_live_from_their_allocation_to_their_end():
    assert peak(alloc("a", 4), alloc("b", 2), free("a"), alloc("c", 3)) == 6


def test_on_cuda_buffers_take_what_the_allocator_gives_them():
    code = LoweredCode((alloc("a", 1), alloc("b", 512), free("a"), alloc("c", 513)), (Result("c", 513),))
    there = as_allocated(code, "cuda")
    assert peak(*there.events) == 512 + 1024
    assert [result.size for result in there.results] == [1024]
    assert as_allocated(code, "cpu") == code


def test_a_buffer_that_is_handed_on_costs_once():
    assert peak(alloc("a", 4), move("a", "b"), free("a"), alloc("c", 1)) == 5
    assert peak(alloc("a", 4), move("a", "b"), free("b"), alloc("c", 5)) == 5


def test_a_buffer_is_gone_with_its_last_name():
    views = alloc("a", 4), alias("a", "b"), free("a")
    assert peak(*views, alloc("c", 3)) == 7
    assert peak(*views, free("b"), alloc("c", 3)) == 4


def test_a_tuple_holds_what_is_taken_out_of_it():
    made = alloc("t:x", 4), alloc("t:y", 2), alias("t:x", "x")
    assert peak(*made, free("t"), free("t:x"), free("t:y"), alloc("c", 3)) == 7
    assert peak(*made, free("x"), alloc("c", 3)) == 9


def test_calls_take_their_workspace_while_they_run():
    call = BufferEvent("call", "a")
    assert peak(alloc("a", 4), call, free("a"), alloc("b", 5), workspace=3) == 7


def test_inputs_die_when_they_are_freed_unless_the_caller_holds_them():
    inputs = {"p": ("buf0", 4), "q": ("buf0", 4), "r": ("buf1", 2)}
    assert peak(given=inputs) == 6
    assert peak(free("p"), alloc("a", 3), given=inputs) == 9
    assert peak(free("p"), free("q"), alloc("a", 3), given=inputs) == 6
    assert peak(free("p"), free("q"), alloc("a", 3), given=inputs, held={"buf0"}) == 9
    assert peak(given=inputs, always=10) == 16


class Feed(nn.Module):
    """A product on both sides of a chain of elementwise ops that is read by its own backward too."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.narrow(functional.gelu(self.wide(x) * 2 + 1)).sum()


@pytest.fixture(scope="module")
def feed():
    return traced(Feed(), x=torch.randn(4, 8, requires_grad=True))


def test_elementwise_ops_between_products_have_no_memory(feed):
    fusion = find_fusion(feed.module, InductorFusion())
    targets = {str(node.target).split(".")[1] for node in fusion.inlined}
    assert {"mul", "add"} <= targets
    assert not {"mm", "addmm", "sum"} & targets


def test_what_products_read_and_make_keeps_its_memory(feed):
    fusion = find_fusion(feed.module, InductorFusion())
    products = [node for node in feed.op_nodes if "mm" in str(node.target)]
    assert len(products) > 3
    for node in products:
        assert node not in fusion.inlined | fusion.kernels
        stack = list(node.all_input_nodes)
        while stack:  # through views
            source = stack.pop()
            if source in feed.node_values and source not in feed.op_nodes and source.op == "call_function":
                stack.extend(source.all_input_nodes)
            assert source not in fusion.inlined


class Shared(nn.Module):
    """An elementwise result without memory of its own, read before a product and after it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        doubled = x * 2
        return (self.layer(doubled.sin()).cos() * doubled).sum()


def test_what_has_no_memory_is_computed_anew_beyond_a_product():
    step = traced(Shared(), x=torch.randn(4, 8, requires_grad=True), fused=True)
    (doubled,) = (node for node in step.fusion.inlined if node.args[1:] == (2,))
    runs = [set()]  # of kernels that may be fused
    for node in emit(step, plain_schedule(step.graph))[0].graph.nodes:
        if OP in node.meta and node.meta[OP] not in step.fused_ops:
            runs.append(set())
        runs[-1].update(source for source in node.all_input_nodes if source.target is doubled.target)
    shared = [run for run in runs if any(source.args[1:] == (2,) for source in run)]
    assert len(shared) == 2
    assert shared[0].isdisjoint(shared[1])


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return functional.dropout(self.layer(x), 0.5).sin().sum()


def test_what_advances_the_generator_runs_once():
    """A compiler cannot set it back, as graphs that run op by op do."""
    for fused in (True, False):
        step = traced(Dropped(), x=torch.randn(4, 8), fused=fused)
        (drawn,) = (op for op, node in enumerate(step.op_nodes) if is_random(node))
        assert step.graph.ops[drawn].recomputable != fused


@examples(40)
@given(st.integers(0, 10_000), st.floats(0, 1))
def test_sunk_recomputations_compute_the_same_in_no_more_memory(seed, share):
    graph = transformer(2)
    schedule = extreme_schedule(graph, seed, share)
    fused = {op.id for op in graph.ops if op.id % 3}
    sunk = sink_recomputations(graph, schedule, fused)
    assert sorted(sunk.steps) == sorted(schedule.steps)
    assert sunk.steps[: sunk.num_forward] == schedule.steps[: schedule.num_forward]
    assert step_memory(graph, sunk).peak <= step_memory(graph, schedule).peak
    kept = [op for op in schedule.steps[schedule.num_forward :] if op not in fused]
    assert [op for op in sunk.steps[sunk.num_forward :] if op not in fused] == kept


def all_at_once(graph):
    """Everything that the backward reads is computed again when it starts."""
    late = graph.phase_ops(Phase.BACKWARD)
    needed = {graph.producer(value) for op in late for value in graph.ops[op].reads}
    first = sorted(op.id for op in needed if op is not None and op.phase is not Phase.BACKWARD)
    forward = graph.phase_ops(Phase.FORWARD)
    return Schedule((*forward, *first, *late), len(forward))


def test_a_recomputation_runs_right_before_it_is_read():
    graph = transformer(2)
    schedule = all_at_once(graph)
    again = {op.id for op in graph.ops if op.phase is not Phase.BACKWARD}
    sunk = sink_recomputations(graph, schedule, again)
    assert step_memory(graph, sunk).peak < step_memory(graph, schedule).peak
    steps = sunk.steps[schedule.num_forward :]
    for now, op in enumerate(steps[:-1]):
        if op in again:
            follower = graph.ops[steps[now + 1]]
            assert steps[now + 1] in again or set(graph.ops[op].writes) & set(follower.reads)

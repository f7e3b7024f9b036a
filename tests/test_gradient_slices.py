"""Gradients of concatenations, made slice by slice: the op, the trial, the rewrite, the checker, training."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hybridremat
from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import capture, compile_step
from hybridremat.compiler.check import check
from hybridremat.compiler.emit import emit
from hybridremat.errors import PlanError
from hybridremat.graph import rewrites
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.rewrites import JointRewrites, slices
from hybridremat.graph.rewrites.slices import INPUT_GRADIENT, SLICES
from hybridremat.planning import pipeline
from support.examples import examples
from support.training import FixedPlanner, train, train_plain
from support.wrapping import HOW, least_limit

CONVOLUTION = torch.ops.aten.convolution_backward.default


class Joined(nn.Module):
    """Branches, concatenated in front of a convolution; ``normed``: and in front of a normalization."""

    def __init__(self, widths=(4, 8, 4), *, groups=1, normed=False, bias=True):
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(3, width, 3, padding=1) for width in widths)
        self.joint = nn.Conv2d(sum(widths), 8, 3, padding=1, groups=groups, bias=bias)
        self.norm = nn.BatchNorm2d(sum(widths)) if normed else None

    def forward(self, x):
        joined = torch.cat([branch(x).relu() for branch in self.branches], 1)
        loss = self.joint(joined).relu().square().mean()
        return loss if self.norm is None else loss + self.norm(joined).sin().mean()


def joined(layout=torch.contiguous_format, **options):
    torch.manual_seed(0)
    model = Joined(**options).to(memory_format=layout)
    return model, {"x": torch.randn(4, 3, 16, 16).contiguous(memory_format=layout)}


def planned_plain(model, batch, rewriting=None):
    """The plain step of the graph as it is rewritten."""
    planner, rewriting = FixedPlanner(), rewriting or JointRewrites(lambda _: KernelStore())
    backend = Backend(pipeline.PlannedPartition(planner.choose, rewriting=rewriting))
    compiled = compile_step(model, backend)
    capture(model, compiled, backend, (), batch).plan()
    model._compiled_call_impl = compiled
    return planner


def calls(step, target):
    return [node for node in step.op_nodes if node.target is target]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_of_a_concatenation_is_made_in_parts_with_the_same_bits(layout, bias):
    model, batch = joined(layout, bias=bias)
    expected = train_plain(model, batch)
    planner = planned_plain(model, batch)
    made = calls(planner.step, INPUT_GRADIENT)
    assert [node.args[3:5] for node in made] == [(0, 4), (4, 12), (12, 16)]
    values = [planner.step.graph.values[v] for node in made for v in planner.step.node_values[node]]
    assert [value.shape[1] for value in values] == [4, 8, 4]
    masks = [node.args[-1] for node in calls(planner.step, CONVOLUTION)]
    assert [False, True, bias] in [list(mask) for mask in masks]
    trained = train(model, batch)
    assert expected.differences(trained) == []
    assert set(trained.peaks) == {step_memory(planner.step.graph, plain_schedule(planner.step.graph)).peak}


def test_flops_are_those_of_the_whole_gradient():
    plain, sliced = (planned_plain(*joined(), how).step.graph for how in (JointRewrites(None), None))
    assert sum(op.flops for op in plain.ops) == sum(op.flops for op in sliced.ops) > 0
    assert len(sliced.ops) == len(plain.ops) + 3


@pytest.mark.parametrize("options", [{"groups": 2}, {"normed": True}, {"widths": (16,)}])
def test_other_gradients_are_made_whole(options):
    assert not calls(planned_plain(*joined(**options)).step, INPUT_GRADIENT)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_gradient_that_is_summed_is_made_whole_unless_its_slices_lie_side_by_side(samples, monkeypatch):
    """Whatever a trial says: sums go by strides. Of one sample slices have those of a tensor of its own."""
    monkeypatch.setattr(slices, "_same_on", lambda *_: True)

    class Shifted(Joined):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            joined = torch.cat([branch(x).tanh() + self.shift for branch in self.branches], 1)
            return self.joint(joined).square().mean()

    torch.manual_seed(0)
    model, batch = Shifted(), {"x": torch.randn(samples, 3, 16, 16)}
    assert bool(calls(planned_plain(model, batch).step, INPUT_GRADIENT)) == (samples == 1)


@pytest.fixture
def untried(monkeypatch):
    """Slices are not tried, and pass."""
    listed = tuple(replace(each, proven=None) if each is SLICES else each for each in rewrites.REWRITES)
    monkeypatch.setattr(rewrites, "REWRITES", listed)


def test_slices_that_overlap_are_taken_of_the_whole(untried):
    """Made one by one, channels of both would be computed twice."""

    class Overlapping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return torch.cat([a, b], 1)

        @staticmethod
        def backward(ctx, gradient):
            return gradient[:, :8], gradient[:, 4:12]

    class Model(Joined):
        def forward(self, x):
            a, b = (branch(x).relu() for branch in self.branches)
            return self.joint(Overlapping.apply(a, b)).relu().square().mean()

    torch.manual_seed(0)
    model, batch = Model((8, 8)), {"x": torch.randn(4, 3, 16, 16)}
    assert not calls(planned_plain(model, batch).step, INPUT_GRADIENT)


@pytest.mark.parametrize("rewrites", ["exact", "none"])
def test_a_step_at_its_least_limit_trains_as_plain(rewrites):
    model, batch = joined(widths=(16, 16))
    expected = train_plain(model, batch)
    limit = least_limit(model, batch, rewrites=rewrites)
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, rewrites=rewrites, **HOW)
    trained = train(model, batch)
    assert expected.differences(trained) == []
    assert max(trained.peaks) <= limit


def test_where_bits_differ_it_is_made_whole(monkeypatch):
    """A reader that goes by the strides of what it is given; and slices with other bits."""
    model, batch = joined()
    run = slices._run

    def by_strides(target, args, kwargs, real):
        result = run(target, args, kwargs, real)
        read = args[0]
        whole = read.target is torch.ops.aten.slice.Tensor and real(read).is_contiguous()
        return result + 1 if whole else result

    with monkeypatch.context() as patch:
        patch.setattr(slices, "_run", by_strides)
        assert not calls(planned_plain(model, batch).step, INPUT_GRADIENT)
    monkeypatch.setattr(slices, "INPUT_GRADIENT", lambda *args: INPUT_GRADIENT(*args) + 1)
    assert not calls(planned_plain(model, batch).step, INPUT_GRADIENT)


def test_a_trial_is_kept(monkeypatch):
    (model, batch), kept = joined(), JointRewrites(KernelStore.for_device)
    assert calls(planned_plain(model, batch, kept).step, INPUT_GRADIENT)
    monkeypatch.setattr(slices, "_has_same_bits", lambda _: pytest.fail("tried again"))
    assert calls(planned_plain(model, batch, kept).step, INPUT_GRADIENT)


def change(node, index, item):
    node.args = (*node.args[:index], item, *node.args[index + 1 :])


@pytest.mark.parametrize("broken", ["start", "end", "weight", "padding", "size"])
def test_the_checker_refuses_other_slices(broken):
    step = planned_plain(*joined()).step
    forward, backward = emit(step, plain_schedule(step.graph))
    check(step, forward, backward)
    node = next(node for node in backward.graph.nodes if node.target is INPUT_GRADIENT)
    index = {"weight": 1, "size": 2, "start": 3, "end": 4, "padding": 6}[broken]
    other = next(n for n in backward.graph.nodes if n.op == "placeholder" and n is not node.args[1])
    wrong = {"weight": other, "size": [4, 16, 8, 8], "padding": [0, 0]}
    change(node, index, wrong.get(broken, 2))
    with pytest.raises(PlanError, match="not computed as in the joint graph"):
        check(step, forward, backward)


def test_the_checker_refuses_a_rewrite_to_other_channels(untried, monkeypatch):
    bounds = slices.slice_bounds
    other = {None: None, (0, 8): (8, 16), (8, 16): (0, 8)}
    monkeypatch.setattr(slices, "slice_bounds", lambda node: other[bounds(node)])
    with pytest.raises(PlanError, match="do not compute the same"):
        planned_plain(*joined(widths=(8, 8)))


@given(data=st.data())
@examples(30)
def test_channels_of_an_input_gradient_are_those_of_autograd(data):
    """Against a plain convolution in float64, of one to three dimensions."""
    dims = data.draw(st.integers(1, 3))
    setting = st.integers(1, 2)
    stride, dilation = ([data.draw(setting) for _ in range(dims)] for _ in range(2))
    padding = [data.draw(st.integers(0, 2)) for _ in range(dims)]
    cuts = sorted(data.draw(st.sets(st.integers(1, 5), min_size=1, max_size=3)) | {0, 6})
    given_ = torch.randn(2, 6, *[7] * dims, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, *[3] * dims, dtype=torch.float64)
    result = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[dims - 1](
        given_, weight, None, stride, padding, dilation
    )
    arrived = torch.randn_like(result)
    (expected,) = torch.autograd.grad(result, given_, arrived)
    size = list(given_.shape)
    settings = stride, padding, dilation, False
    made = [INPUT_GRADIENT(arrived, weight, size, *cut, *settings) for cut in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(made, 1), expected, rtol=1e-12, atol=1e-12)

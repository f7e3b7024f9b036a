"""Rewrites that are to leave every bit: where kernels go by layouts, and where one draw tells too little."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hybridremat
from hybridremat.graph.rewrites.by_element import same_by_element
from hybridremat.graph.rewrites.trial import draws
from support.examples import examples
from support.wrapping import HOW

ATEN = torch.ops.aten


class ChannelNorm(nn.Module):
    """A LayerNorm over channels: what it returns is permuted."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Shifted(nn.Module):
    """One number for all channels, or one for each: their gradients are sums of what arrives."""

    def __init__(self, *shape):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        return x.tanh() + self.shift


class Gated(nn.Module):
    """A residual with a gate for each channel."""

    def __init__(self, width, inner):
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x):
        return x + self.gate.sigmoid() * (self.inner(x) - x)


BRANCHES = {
    "nothing": lambda width: nn.Identity(),
    "relu": lambda width: nn.ReLU(),
    "silu": lambda width: nn.SiLU(),
    "gelu": lambda width: nn.GELU(),
    "one shift": lambda width: Shifted(1),
    "shifts": lambda width: Shifted(width, 1, 1),
    "batch norm": nn.BatchNorm2d,
    "group norm": partial(nn.GroupNorm, 1),
    "channel norm": ChannelNorm,
    "pooled": lambda width: nn.MaxPool2d(3, 1, 1),
    "depthwise": lambda width: nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
    "transposed": lambda width: nn.ConvTranspose2d(width, width, 3, padding=1),
    "gated": lambda width: Gated(width, nn.Conv2d(width, width, 1)),
    "gated depthwise": lambda width: Gated(
        width, nn.Sequential(BRANCHES["depthwise"](width), nn.BatchNorm2d(width))
    ),
    "gated norm": lambda width: Gated(width, nn.Sequential(ChannelNorm(width), nn.Conv2d(width, width, 1))),
}


class Joined(nn.Module):
    """Branches of like width, joined in front of a convolution, twice."""

    def __init__(self, width, names, kernel):
        super().__init__()
        self.first = nn.Conv2d(3, width, 1)
        self.branches = nn.ModuleList(BRANCHES[name](width) for name in names)
        self.joint = nn.Conv2d(width * len(names), width, kernel, padding=kernel // 2)
        self.last = ChannelNorm(width)

    def forward(self, x):
        for _ in range(2):
            made = self.first(x)
            made = self.joint(torch.cat([branch(made) for branch in self.branches], 1))
            x = x + made[:, :3]
        return self.last(made).mean((2, 3)).sin().sum()


def differing(model, batches):
    """The batches and parameters whose gradients are not those of plain training."""
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, args=(batches[0],), memory_limit="100%", **HOW)
    found = []
    for number, batch in enumerate(batches):
        for each in (plain, model):
            each.zero_grad()
            each(batch).backward()
        pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
        found += [(number, name) for (name, one), other in pairs if not torch.equal(one.grad, other.grad)]
    return found


@examples(40, suppress_health_check=list(HealthCheck))
@given(
    width=st.sampled_from([4, 8, 16, 48]),
    names=st.lists(st.sampled_from(sorted(BRANCHES)), min_size=2, max_size=3),
    kernel=st.sampled_from([1, 3]),
    batch=st.integers(2, 3),
    sides=st.sampled_from([(1, 1), (1, 1), (1, 4), (4, 1), (2, 3), (5, 5), (6, 6)]),
    last=st.booleans(),
)
@example(8, ["one shift", "gated depthwise"], 3, 2, (5, 5), False)
@example(8, ["nothing", "transposed", "pooled"], 3, 2, (1, 1), True)
def test_concatenations_and_small_maps_train_with_plain_bits(width, names, kernel, batch, sides, last):
    torch.manual_seed(0)
    torch._dynamo.reset()
    layout = torch.channels_last if last else torch.contiguous_format
    model = Joined(width, names, kernel).to(memory_format=layout)
    batches = [torch.randn(batch, 3, *sides).contiguous(memory_format=layout) for _ in range(3)]
    assert differing(model, batches) == []


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (3, 4, 4, 4), (2, 16, 1, 1), (1, 5, 3, 3)])
@pytest.mark.parametrize("op", ["silu_backward", "gelu_backward", "threshold_backward", "tanh_backward"])
def test_kernels_by_element_are_told_apart_by_where_an_element_lies(op, shape):
    """Against many random numbers, in a slice of channels and in a tensor of its own."""
    samples, channels, *side = shape
    graph, target = fx.Graph(), getattr(torch.ops.aten, op).default
    nodes = [graph.placeholder(name) for name in "ab"]
    with FakeTensorMode():
        for node in nodes:
            node.meta["val"] = torch.empty(shape)
    rest = (0.0,) if op == "threshold_backward" else ()
    call = graph.call_function(target, (*nodes, *rest))

    def slice_and_own():
        whole = torch.randn(samples, 2 * channels, *side)
        return whole[:, :channels], whole[:, :channels].clone(memory_format=torch.contiguous_format)

    def same():
        other, both = torch.randn(shape), slice_and_own()
        return torch.equal(*(target(each, other, *rest) for each in both))

    found = same_by_element(call, nodes[0], *(each.stride() for each in slice_and_own()))
    assert found == all(same() for _ in range(200))


@pytest.mark.parametrize(("size", "count"), [((), 32), ((8,), 4), ((64, 64), 2), ((1 << 12, 1 << 10), 2)])
def test_calls_are_tried_until_enough_numbers_have_been_compared(size, count):
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(size, device="meta")
    assert draws(node) == count

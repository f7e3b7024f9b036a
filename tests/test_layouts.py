"""Kernels whose results have other strides than PyTorch traced."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import hybridremat
from hybridremat.compiler import layout_trials
from hybridremat.graph.private_torch import boxed_nop
from hybridremat.graph.tracing import layouts
from hybridremat.graph.tracing.layouts import is_doubtful
from support.training import train


class NormOfTransposed(nn.Module):
    """BatchNorm of a transposed input, as in PatchTST: traced transposed, and really contiguous."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(hidden).tanh().square().mean()


class SoftplusOfTransposed(nn.Module):
    """The gradient of a softplus, as in Qwen3-Next: traced contiguous, and really transposed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)

    def forward(self, x):
        gates = nn.functional.softplus(self.first(x))
        return (gates.transpose(1, 2).contiguous().cumsum(-1).sin() * 2).mean()


class ConvolutionOfNorm(nn.Module):
    """A convolution, whose layout PyTorch traces by that of its input, of what really is contiguous."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(8), nn.Conv1d(8, 4, 3)

    def forward(self, x):
        return self.last(self.norm(x.transpose(1, 2))).flatten(1).tanh().square().mean()


class ConvolutionBelowSoftplus(nn.Module):
    """The gradient of a convolution follows what it gets, which is transposed and traced contiguous."""

    def __init__(self):
        super().__init__()
        self.first, self.conv = nn.Linear(8, 32), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        gates = nn.functional.softplus(self.conv(self.first(x).view(4, 8, 6, 4)))
        return (gates.permute(0, 2, 3, 1).contiguous().cumsum(-1).sin() * 2).mean()


class MapsOfOneElement(nn.Module):
    """Traced with other strides than come, and kernels go by these (EfficientViM at 64 pixels)."""

    def __init__(self):
        super().__init__()
        self.deep, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.wide, self.narrow, self.last = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1), nn.LayerNorm(8)
        self.gates = nn.Parameter(torch.full((2, 8, 1, 1), 0.1))

    def forward(self, x):
        x = x.reshape(-1, 8, 1, 1)
        x = x + self.gates[0].sigmoid() * (self.norm(self.deep(x)) - x)
        x = x + self.gates[1].sigmoid() * (self.narrow(self.wide(x).relu()) - x)
        return self.last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).mean((2, 3)).sin().sum()


NETS = [MapsOfOneElement, ConvolutionBelowSoftplus, NormOfTransposed, SoftplusOfTransposed, ConvolutionOfNorm]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("how", [{}, {"rewrites": "none"}, {"graph_breaks": "plan"}], ids=str)
def test_a_step_with_other_strides_than_traced_trains_as_planned(net, how):
    torch.manual_seed(0)
    model = net()
    plain, batch = copy.deepcopy(model), {"x": torch.randn(4, 6, 8)}
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", cost_model="flops", progress=False, **how)
    mine = train(model, batch)
    assert train(plain, batch).differences(mine) == []
    assert max(mine.peaks) == hybridremat.get_plan(model).predicted_peak


@pytest.mark.parametrize("how", [{}, {"graph_breaks": "plan"}, {"units": ["norm"]}], ids=str)
def test_a_step_that_is_captured_again_runs_no_kernels_beside_it(monkeypatch, how):
    torch.manual_seed(0)
    model, batch = NormOfTransposed(), {"x": torch.randn(4, 6, 8)}
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", cost_model="flops", progress=False, **how)
    captured = []
    monkeypatch.setattr(layouts, "is_doubtful", lambda node: captured.append(node) or is_doubtful(node))
    monkeypatch.setattr(layout_trials, "_tried", lambda *_: pytest.fail("a kernel is tried in training"))
    for module in (model, *model.children()):  # as fully_shard does
        module.__class__ = type(f"Other{type(module).__name__}", (type(module),), {})
    model(**batch).backward()
    assert captured


def test_pytorch_alone_fails_on_the_strides_that_it_traces():
    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        torch.compile(NormOfTransposed(), backend=backend, dynamic=False)(torch.randn(4, 6, 8))

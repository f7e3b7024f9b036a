"""The comparison with checkpointing each layer, against steps with torch.utils.checkpoint around each."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hybridremat
from hybridremat.graph.joint import plain_schedule
from hybridremat.sequence.pool import Pool
from hybridremat.sequence.strategies.layers import checkpointed_layers, layers_of
from hybridremat.zoo.models import reference_model
from support.training import Transformer, allocated_peak, loss_in, small, traced
from support.wrapping import HOW

CLOSE = 0.1
"""Of what is measured: eager PyTorch takes up to 7 % more here than the ops of its step in captured order,
where each buffer goes with its last reader."""
TINY = {"num_attention_heads": 4, "hidden_size": 64, "vocab_size": 512, "batch": 2, "length": 64}
GPT2 = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 512, "batch": 2, "length": 64}


class Stack(nn.Module):
    """Layers of one make in a list, and a head."""

    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Tanh())
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).pow(2).mean()


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


def built(name, changes):
    return lambda: reference_model(name, 0.0, changes)


MODELS = {
    "stack": (lambda: (Stack(), {"x": torch.randn(256, 64)}), [f"layers.{n}" for n in range(6)]),
    "transformer": (
        lambda: (Transformer(4, 64), {"tokens": torch.randint(0, 50, (4, 48))}),
        [f"blocks.{n}" for n in range(4)],
    ),
    "unet": (
        built("unet", {"base": 8, "depth": 3, "batch": 2, "pixels": 32}),
        [f"{part}.{n}" for part in ("down", "merge") for n in range(3)],
    ),
    "gpt2": (built("gpt2", GPT2), [f"transformer.h.{n}" for n in range(4)]),
    "llama": (
        built("llama", {"num_hidden_layers": 3, "num_key_value_heads": 4, "intermediate_size": 128, **TINY}),
        [f"model.layers.{n}" for n in range(3)],
    ),
    "t5": (
        built("t5", {"num_layers": 3, "d_model": 64, "vocab_size": 512, "batch": 2, "length": 32}),
        [f"{part}.block.{n}" for part, count in (("decoder", 4), ("encoder", 3)) for n in range(count)],
    ),
    "resnet50": (
        built("resnet50", {"batch": 2, "pixels": 64}),
        [
            f"resnet.encoder.stages.{stage}.layers.{n}"
            for stage, count in enumerate((3, 4, 6, 3))
            for n in range(count)
        ],
    ),
}
QUICK = ("stack", "transformer")


def measured(model, batch):
    """Bytes of step memory and flops."""

    def step():
        loss_in(model(**batch)).backward()

    with FlopCounterMode(display=False) as counter:
        step()
    for parameter in model.parameters():
        parameter.grad = None
    return allocated_peak(step), counter.get_total_flops()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_it_is_what_pytorch_takes_with_each_layer_checkpointed(name):
    make, layers = MODELS[name]
    torch.manual_seed(0)
    model, batch = make()
    graph = traced(model, **batch).graph
    assert sorted(set(layers_of(graph).values())) == layers
    point = checkpointed_layers(graph)
    user = copy.deepcopy(model)
    for path in layers:
        parent, _, last = path.rpartition(".")
        setattr(user.get_submodule(parent), last, Checkpointed(user.get_submodule(path)))
    (_, plain_flops), (peak, flops) = measured(model, batch), measured(user, batch)
    assert point.peak == pytest.approx(peak, rel=0.01 if name == "stack" else CLOSE)
    own_plain = sum(op.flops for op in graph.ops)
    assert point.flops / own_plain == pytest.approx(flops / plain_flops, abs=0.03)
    # each layer's forward runs once more at most, and everything else once
    runs = {op: point.schedule.steps.count(op) for op in point.schedule.steps}
    assert {op for op, times in runs.items() if times > 1} <= set(layers_of(graph))
    assert set(runs) == set(plain_schedule(graph).steps) and max(runs.values()) == 2


class Blocks(nn.Module):
    """A network in stages, as torchvision's ResNet names them: stages of blocks of one make."""

    def __init__(self, counts=(2, 2)) -> None:
        super().__init__()
        for number, count in enumerate(counts, start=1):
            blocks = (nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)) for _ in range(count))
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.stages = nn.ModuleList(self.children())

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x.sum()


def test_the_layers_of_a_network_in_stages_are_its_blocks():
    found = set(layers_of(traced(Blocks((2, 2)), x=torch.randn(8, 16)).graph).values())
    assert {layer.rpartition(".")[2] for layer in found} == {"0", "1"} and len(found) == 4
    assert all(layer.count(".") >= 1 for layer in found)


@pytest.mark.parametrize("name", ["mlp", "convnet"])  # lists of single Linears, Conv2ds, norms
def test_without_layers_that_repeat_there_is_no_comparison(name):
    model, batch = small(name)
    assert checkpointed_layers(traced(model, **batch).graph) is None
    found = hybridremat.frontier(model, kwargs=batch, **HOW)
    assert found.checkpointed is None and found.to_dict()["checkpointed"] is None
    assert "checkpointed" not in str(found)


def test_a_figure_that_the_frontier_has_is_left_out():
    torch.manual_seed(0)
    model, batch = Stack(layers=3), {"x": torch.randn(64, 64)}
    found = hybridremat.frontier(model, kwargs=batch, **HOW)
    assert "each layer checkpointed, for comparison:" in str(found)
    step = found._step_frontier
    assert step.checkpointed() == found.checkpointed is not None
    point = checkpointed_layers(step.graph)
    with_it = replace(step, pool=Pool((point, *step.candidates), step.pool.base))
    assert with_it.checkpointed() is None
    alone = replace(step, pool=Pool((), ()), plain=replace(step.plain, phases=point.phases, time=point.time))
    assert alone.checkpointed() is None


def test_plans_and_frontiers_tell_the_same():
    model, batch = Stack(layers=3), {"x": torch.randn(64, 64)}
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="90%", **HOW)
    found = hybridremat.frontier(model, kwargs=batch, **HOW)
    assert plan.details.checkpointed == found.checkpointed is not None

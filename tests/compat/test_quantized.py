"""Frozen base weights in 8 and 4 bits with trained adapters beside them (LoRA), held to plain training."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import hybridremat
from support.training import train

pytestmark = pytest.mark.compat
WIDTH, GROUP = 64, "Quantized weights"


class Adapted(nn.Module):
    """A frozen layer, and a low-rank one beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self, quantized):
        super().__init__()
        self.layers = nn.ModuleList(Adapted(quantized(nn.Linear(WIDTH, WIDTH))) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def torchao_int8(layer):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(outer := nn.Sequential(layer), Int8WeightOnlyConfig())
    return outer[0]


def bitsandbytes_int8(layer):
    import bitsandbytes

    return _filled(bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False), layer)


def bitsandbytes_nf4(layer):
    import bitsandbytes

    return _filled(
        bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4"), layer
    )


def _filled(quantized, layer):
    quantized.load_state_dict(layer.state_dict())
    return quantized.to("cpu")  # quantizes


@pytest.mark.parametrize("quantized", [torchao_int8, bitsandbytes_int8, bitsandbytes_nf4])
def test_adapters_on_quantized_weights_train_as_in_plain_pytorch(quantized, quantizers, line):
    package, bits = quantized.__name__.split("_")
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make compat` installs it")
    torch.manual_seed(0)
    model, batch = Net(quantized), {"x": torch.randn(32, WIDTH)}
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=batch, memory_limit="80%", cost_model="flops", progress=False)
    mine, theirs = train(model, batch), train(plain, batch)
    compared = [name for name, tensor in mine.tensors.items() if type(tensor) in (torch.Tensor, nn.Parameter)]
    assert [n for n in compared if not torch.equal(mine.tensors[n], theirs.tensors[n])] == []
    assert any("up" in name for name in compared)
    assert max(mine.peaks) <= hybridremat.get_plan(model).memory_limit
    line(GROUP, f"LoRA on {bits} weights, {package}", "as plain PyTorch, in the limit")

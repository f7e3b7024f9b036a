"""The models of the GPU benchmark: built-in ones at sizes that people train, and tiny ones for a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridremat.zoo.models import reference_model


@dataclass(frozen=True)
class Bench:
    """One model of the benchmark.

    Attributes
    ----------
    base
        The built-in model that it is a size of.
    changes, small
        Fields of its config: at full size, and for the dry run.
    layer
        Class name of the modules that per-layer checkpointing runs again.
    unit
        What is counted a second; a sample is ``length`` tokens or one image.
    """

    title: str
    base: str
    changes: Mapping[str, object]
    small: Mapping[str, object]
    layer: str
    unit: str = "images"

    def sample(self, *, small: bool) -> int:
        """Units in one sample."""
        chosen = self.small if small else self.changes
        return int(str(chosen["length"])) if "length" in chosen else 1

    def make(self, batch: int, device: str, *, small: bool) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model in train mode and a batch, made on the device: bfloat16, or float32 for the dry run."""
        chosen = {"dtype": "float32", **self.small} if small else {"dtype": "bfloat16", **self.changes}
        with torch.device(device):
            model, inputs = reference_model(self.base, changes={**chosen, "batch": batch})
        return model.to(device), {name: tensor.to(device) for name, tensor in inputs.items()}


def _gpt2(layers: int, width: int, heads: int) -> dict[str, object]:
    return {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": 50257, "length": 1024}


_LLAMA: dict[str, object] = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "length": 2048,
}
_VIT: dict[str, object] = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "num_labels": 1000,
    "pixels": 224,
}
_SMALL_GPT2: dict[str, object] = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "length": 64}
_SMALL_LLAMA: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "length": 64,
}
_SMALL_VIT: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "pixels": 64,
}
_SMALL_RESNET: dict[str, object] = {
    "depths": [1, 1],
    "hidden_sizes": [32, 64],
    "embedding_size": 16,
    "pixels": 64,
}
_SMALL_UNET: dict[str, object] = {"base": 8, "depth": 2, "pixels": 32}

# The first ones get all methods, and all get the first methods: see gpu_schedule.
BENCHES: dict[str, Bench] = {
    "gpt2": Bench("GPT-2 124M", "gpt2", _gpt2(12, 768, 12), _SMALL_GPT2, "GPT2Block", "tokens"),
    "resnet50": Bench(
        "ResNet-50", "resnet50", {"num_labels": 1000, "pixels": 224}, _SMALL_RESNET, "ResNetBottleNeckLayer"
    ),
    "llama1b": Bench("Llama-like 1.1B", "llama", _LLAMA, _SMALL_LLAMA, "LlamaDecoderLayer", "tokens"),
    "vitl": Bench("ViT-L/16", "vit", _VIT, _SMALL_VIT, "ViTLayer"),
    "unet": Bench("U-Net, 512 px", "unet", {"base": 64, "pixels": 512}, _SMALL_UNET, "Sequential"),
    "gpt2xl": Bench("GPT-2 1.5B", "gpt2", _gpt2(48, 1600, 25), _SMALL_GPT2, "GPT2Block", "tokens"),
    "resnet152": Bench(
        "ResNet-152",
        "resnet50",
        {"num_labels": 1000, "pixels": 224, "depths": [3, 8, 36, 3]},
        {**_SMALL_RESNET, "depths": [1, 2]},
        "ResNetBottleNeckLayer",
    ),
}

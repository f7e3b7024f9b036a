"""What is planned with moves for devices that are not here: models, devices, links and limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LIMITS: Final = (80, 60, 50, 40, 30, 25)
LEAST: Final = "least"
PEERS: Final = ("offload-all", "offload-inputs")
ALL_LINKS: Final = (5.0, 12.0, 25.0, 50.0)

GPT2: Final = {
    "n_layer": 24,
    "n_embd": 1024,
    "n_head": 16,
    "n_positions": 1024,
    "vocab_size": 50257,
    "batch": 8,
    "length": 1024,
}
LLAMA_1B: Final = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "batch": 4,
    "length": 2048,
}
LLAMA_8B: Final = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "batch": 2,
    "length": 4096,
}
IMAGES: Final = {"num_labels": 1000, "batch": 64, "pixels": 224}
UNET: Final = {"base": 64, "batch": 16, "pixels": 256}

MODELS: Final[Mapping[str, tuple[str, Mapping[str, object], str, tuple[float, ...]]]] = {
    "GPT-2 medium 8×1024, a10": ("gpt2", GPT2, "a10", (25.0,)),
    "GPT-2 medium 8×1024, h100": ("gpt2", GPT2, "h100", (50.0,)),
    "Llama-1B 4×2048, a100-80g": ("llama", LLAMA_1B, "a100-80g", (25.0,)),
    "Llama-8B 2×4096, h100": ("llama", LLAMA_8B, "h100", (50.0,)),
    "ResNet-50 b64, rtx3090": ("resnet50", IMAGES, "rtx3090", (25.0,)),
    "ResNet-152 b64, a100-80g": ("resnet50", {**IMAGES, "depths": [3, 8, 36, 3]}, "a100-80g", (25.0, 50.0)),
    "U-Net 16×256², rtx3090": ("unet", UNET, "rtx3090", (25.0,)),
}
"""By title: the built-in model, what is changed of it, the device, and the links of its own."""

"""Small models of kinds that people train, as units under FSDP2: what each rank does; see processes.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import distributed, nn

from hybridremat.zoo.models import reference_model
from support.sharded_cases import Case, Tokens, run_cases, texts

GPT2 = {"n_layer": 3, "n_embd": 48, "n_head": 3, "vocab_size": 211, "length": 64, "batch": 4}
LLAMA: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 211,
    "attention_dropout": 0.1,
    "length": 64,
    "batch": 4,
}
RESNET = {"depths": [1, 2, 1], "hidden_sizes": [24, 48, 96], "embedding_size": 12, "pixels": 64, "batch": 4}


class WithLoss(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, name: str, changes: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, _ = reference_model(name, dropout=0.0 if name == "resnet50" else 0.1, changes=changes)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The loss on a batch."""
        return self.model(**inputs).loss


def batch(name: str, changes: Mapping[str, Any], rank: int, step: int) -> dict[str, torch.Tensor]:
    """The model's batch, another one on each rank and in each step."""
    _, inputs = reference_model(name, changes=changes)
    return {key: each.roll(1 + 10 * rank + step, -1) for key, each in inputs.items()}


def _case(name: str, changes: Mapping[str, Any], *units: str) -> Case:
    return Case(partial(WithLoss, name, changes), partial(batch, name, changes), units, limits=("60%",))


MODELS = {
    "gpt2": _case("gpt2", GPT2, "model.transformer.h.*"),
    "llama": _case("llama", LLAMA, "model.model.layers.*"),
    "resnet50": _case("resnet50", RESNET, "model.resnet.encoder.stages.*"),
}


def on_device(rank: int) -> dict[str, Any]:
    """A net on the device of the process group: on a GPU streams overlap, and one rank needs no link."""
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"

    def put(rank: int, step: int) -> dict[str, torch.Tensor]:
        return {name: each.to(device) for name, each in texts(rank, step).items()}

    return run_cases({"tokens": Case(lambda: Tokens().to(device), put, limits=("100%", "60%"))}, rank)


def models(rank: int) -> dict[str, Any]:
    """All of them, planned and plain."""
    return run_cases(MODELS, rank)

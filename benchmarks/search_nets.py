"""Nets whose blocks are hard to search: cheap ops in long rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

Made = tuple[nn.Module, dict[str, Any]]


class Row(nn.Module):
    """Elementwise ops in a row; with ``outputs`` every second one is returned as well."""

    def __init__(self, ops: int, *, outputs: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64))
        self.ops, self.outputs = ops, outputs

    def forward(self, x: torch.Tensor) -> Any:
        """The loss, and what is returned beside it."""
        functions = (torch.sin, torch.sigmoid, torch.tanh, torch.cos, torch.erf)
        hidden, kept = x * self.weight, []
        for number in range(self.ops):
            hidden = functions[number % (2 if self.outputs else 5)](hidden)
            if self.outputs and number % 2:
                kept.append(hidden)
        if self.outputs:
            return sum(each.square().mean() for each in kept), kept
        return hidden.square().mean()


def _row(ops: int, **how: bool) -> Made:
    return Row(ops, **how), {"x": torch.randn(256, 64)}


def _rwkv() -> Made:
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(
        vocab_size=128, hidden_size=64, attention_hidden_size=64, num_hidden_layers=2, context_length=64
    )
    tokens = torch.randint(0, 128, (2, 64))
    return RwkvForCausalLM(config), {"input_ids": tokens, "labels": tokens}


NETS: Final[dict[str, Callable[[], Made]]] = {
    "300 elementwise ops": lambda: _row(300),
    "60 steps of sin and sigmoid, 60 outputs": lambda: _row(120, outputs=True),
    "RWKV, 2 layers, 64 tokens": _rwkv,
}

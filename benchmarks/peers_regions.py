"""Layers compiled one by one, each with a budget of its own: PyTorch's ``region_activation_memory_budget``.

One compiled graph takes one budget, and the annotation has to cover all of it, so that regions with budgets
of their own are graphs of their own. What is outside of layers runs as it is. torch 2.13 has it; 2.15 has the
setting ``activation_memory_budget_require_full_coverage`` besides: switched off, a region sets the budget of
the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import region_activation_memory_budget

BUDGETS: Final = {
    "0.5 in each layer": (0.5,),
    "0.0 in each layer": (0.0,),
    "0.0 and 1.0 in turn": (0.0, 1.0),
}
"""By the name of a setting: budgets that layers take in turn."""

SETTINGS: Final = tuple(BUDGETS)
PLAIN: Final = "1.0 in each layer"
"""Makes no product again."""


def annotated(run: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """A forward under a budget."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with region_activation_memory_budget(budget):
            return run(*args, **kwargs)

    return forward


def compile_each(layers: Sequence[nn.Module], setting: str, backend: Callable[..., Any]) -> None:
    """Compile each layer by itself under its budget of a setting of :data:`BUDGETS`."""
    torch._dynamo.config.recompile_limit = max(64, 2 * len(layers))  # one code object, a graph for each layer
    torch._dynamo.config.specialize_float = True  # else a second budget is a symbol, which no region takes
    budgets = (1.0,) if setting == PLAIN else BUDGETS[setting]
    for number, layer in enumerate(layers):
        run = annotated(layer.forward, budgets[number % len(budgets)])
        layer.forward = torch.compile(run, backend=backend)  # type: ignore[method-assign]

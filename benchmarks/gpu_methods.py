"""The methods of the GPU benchmark: what each does to a model before it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hybridremat

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Asked:
    """What the methods are given: our limit, the class of layers to checkpoint, processes for planning."""

    limit: int | str
    layer: str
    workers: int | None = None


@dataclass(frozen=True)
class Method:
    """One method; ``prepare`` changes the model in place, ``undo`` makes it plain for another batch.

    ``least_seconds`` is what a stage with it needs on a GPU, about; ``compiler`` is that of our plans.
    """

    title: str
    prepare: Callable[[nn.Module, Batch, Asked], None]
    least_seconds: int
    undo: Callable[[nn.Module], object] = lambda model: None
    compiler: str = ""


def _eager(model: nn.Module, batch: Batch, asked: Asked) -> None:
    pass


def _checkpoint(model: nn.Module, batch: Batch, asked: Asked) -> None:
    layers = [module for module in model.modules() if type(module).__name__ == asked.layer]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no {asked.layer} to checkpoint")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]


def _uncheckpoint(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop("forward", None)


def _compile(budget: float, model: nn.Module, batch: Batch, asked: Asked) -> None:
    functorch_config.activation_memory_budget = budget
    model.compile(dynamic=False)


def _uncompile(model: nn.Module) -> None:
    model._compiled_call_impl = None


def _plan(compiler: Literal["eager", "inductor"], model: nn.Module, batch: Batch, asked: Asked) -> None:
    hybridremat.wrap(
        model,
        kwargs=dict(batch),
        memory_limit=asked.limit,
        on_infeasible="least",
        compiler=compiler,
        workers=asked.workers,
        progress=False,
    )


# By what is to be known first: see gpu_schedule.
METHODS: dict[str, Method] = {
    "eager": Method("eager", _eager, 40),
    "ours": Method("hybridremat", partial(_plan, "eager"), 60, hybridremat.unwrap, "eager"),
    "checkpoint": Method("checkpoint each layer", _checkpoint, 30, _uncheckpoint),
    "compile": Method("torch.compile", partial(_compile, 1.0), 75, _uncompile),
    "ours-compiled": Method(
        "hybridremat, compiled", partial(_plan, "inductor"), 120, hybridremat.unwrap, "inductor"
    ),
    "compile-0.5": Method("torch.compile, budget 0.5", partial(_compile, 0.5), 75, _uncompile),
    "compile-0.2": Method("torch.compile, budget 0.2", partial(_compile, 0.2), 75, _uncompile),
}

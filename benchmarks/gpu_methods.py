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


@dataclass(frozen=True)
class Task:
    """A model to prepare for training on a batch; our limit, layers to checkpoint, processes for planning."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    limit: int | str
    layer: str
    workers: int | None = None


@dataclass(frozen=True)
class Method:
    """One method; ``prepare`` changes the model in place.

    ``least_seconds`` is what a stage with it needs on a GPU, about; ``compiler`` is that of our plans.
    """

    title: str
    prepare: Callable[[Task], None]
    least_seconds: int
    compiler: str = ""


def _nothing(_: Task) -> None:
    pass


def _checkpoint(task: Task) -> None:
    layers = [module for module in task.model.modules() if type(module).__name__ == task.layer]
    if not layers:
        raise ValueError(f"{type(task.model).__name__} has no {task.layer} to checkpoint")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]


def _compile(budget: float, task: Task) -> None:
    functorch_config.activation_memory_budget = budget
    task.model.compile(dynamic=False)


def _plan(compiler: Literal["eager", "inductor"], task: Task) -> None:
    hybridremat.wrap(
        task.model,
        kwargs=dict(task.batch),
        memory_limit=task.limit,
        on_infeasible="least",
        compiler=compiler,
        workers=task.workers,
        progress=False,
    )


def _stock(budget: float) -> Method:
    title = "torch.compile" if budget == 1.0 else f"torch.compile, budget {budget}"
    return Method(title, partial(_compile, budget), 100)


def _ours(title: str, compiler: Literal["eager", "inductor"], seconds: int) -> Method:
    return Method(title, partial(_plan, compiler), seconds, compiler)


# By what is to be known first: see gpu_schedule.
METHODS: dict[str, Method] = {
    "eager": Method("eager", _nothing, 75),
    "ours": _ours("hybridremat", "eager", 90),
    "checkpoint": Method("checkpoint each layer", _checkpoint, 60),
    "compile": _stock(1.0),
    "ours-compiled": _ours("hybridremat, compiled", "inductor", 120),
    "compile-0.5": _stock(0.5),
    "compile-0.2": _stock(0.2),
}

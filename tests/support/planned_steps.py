"""Counts of planned forwards, and of the forwards of a plain model that would have been planned.

A library that calls ``model.forward`` itself runs a wrapped model plain: the numbers are equal, and nothing
is shown by that. So tests that compare numbers count as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps

import pytest
import torch
from torch import nn

from hybridremat.runtime.planned_call import PlannedCall


@contextmanager
def planned_forwards() -> Iterator[list[nn.Module]]:
    """Collects the wrapped module of each planned forward that returns."""
    ran: list[nn.Module] = []
    planned = PlannedCall._planned_forward

    def counted(self, args, kwargs, held):
        output = planned(self, args, kwargs, held)
        ran.append(self.model)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedCall, "_planned_forward", counted)
        yield ran


@contextmanager
def training_forwards(*modules: nn.Module) -> Iterator[list[nn.Module]]:
    """Collects the plain module of each forward in training mode and with gradients, called in any way."""
    ran: list[nn.Module] = []
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_counted_forward(module, ran))
        yield ran


@contextmanager
def _counted_forward(module: nn.Module, ran: list[nn.Module]) -> Iterator[None]:
    kind = type(module)
    forward = kind.forward

    @wraps(forward)
    def counted(self, *args, **kwargs):
        trains = self is module and self.training and torch.is_grad_enabled()
        output = forward(self, *args, **kwargs)
        if trains:
            ran.append(self)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", counted)  # on the class: nothing is found on the module itself
        yield


def wrapped_names(model: nn.Module) -> list[str]:
    """Names of the wrapped modules in a model, "" for itself."""
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module._compiled_call_impl, PlannedCall)]


def times_each(modules: list[nn.Module], model: nn.Module, names: list[str]) -> dict[str, int]:
    """How often each named module of a model is among those collected."""
    named = {name: model.get_submodule(name) for name in names}
    return {name: sum(module is one for one in modules) for name, module in named.items()}


def plans_made(model: nn.Module) -> int:
    """How many plans a wrapped model has: one for each graph of its steps so far."""
    return len(model._compiled_call_impl.context.store)

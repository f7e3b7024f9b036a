"""What a module's forward reads beside its inputs, as it was at one moment, to run that forward once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybridremat.compiler.random_states import (
    python_states,
    random_states_restored,
    set_python_states,
)
from hybridremat.graph.private_torch import tree_leaves

_OWN = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


class Moment:
    """Buffers, attributes of modules, random states and autocast, as they are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [(module, _attributes(module)) for module in model.modules()]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._drawn = python_states()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if _cuda_runs() else []
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds
        ]

    def forget_unchanged(self) -> None:
        """Drop the copies of buffers that have not changed since."""
        self._buffers = [
            (module, name, buffer, values)  # not by its version: a kernel of BatchNorm does not count it up
            for module, name, buffer, values in self._buffers
            if module._buffers.get(name) is not buffer or not torch.equal(buffer, values)
        ]

    def stored(self) -> bool:
        """Whether a module has since come to hold a tensor that may be a result: ``self.last = x``."""
        return any(
            isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            for module, before in self._attributes
            for name, value in _attributes(module).items()
            if _differ(value, before.get(name, _ABSENT))
            for leaf in tree_leaves(value.items if isinstance(value, _Copied) else value)
        )

    def restore(self) -> None:
        """Make everything as it was, but autocast."""
        for module, before in self._attributes:
            _set_attributes(module, before)
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                buffer.copy_(values)
                module._buffers[name] = buffer
        set_python_states(self._drawn)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything as it was; at exit attributes and random states are those of now, buffers what came."""
        now = [(module, _attributes(module)) for module, _ in self._attributes]
        with random_states_restored(cuda=bool(self._cuda)), ExitStack() as stack:
            self.restore()
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            try:
                yield
            finally:
                for module, values in now:
                    _set_attributes(module, values)


def _cuda_runs() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


@dataclass(frozen=True)
class _Copied:
    """A list or dictionary, and what was in it."""

    held: Any
    items: Any

    def refilled(self) -> Any:
        """The list or dictionary, with that in it again."""
        if isinstance(self.held, list):
            self.held[:] = self.items
        else:
            self.held.clear()
            self.held.update(self.items)
        return self.held


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, with copies of the lists and dictionaries among them."""
    return {
        name: _Copied(value, copy(value)) if type(value) in (list, dict) else value
        for name, value in vars(module).items()
        if name not in _OWN
    }


def _differ(value: object, before: object) -> bool:
    """Whether an entry of :func:`_attributes` has changed."""
    if not (isinstance(value, _Copied) and isinstance(before, _Copied)):
        return value is not before
    return [id(leaf) for leaf in tree_leaves(value.items)] != [id(leaf) for leaf in tree_leaves(before.items)]


def _set_attributes(module: nn.Module, values: dict[str, Any]) -> None:
    """Give a module the attributes of :func:`_attributes` again; what a first call has added stays."""
    for name, value in values.items():
        vars(module)[name] = value.refilled() if isinstance(value, _Copied) else value

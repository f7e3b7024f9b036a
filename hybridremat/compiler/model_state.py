"""Restore a model's state after trial runs, and tell whether its own code has changed anything."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybridremat.compiler.early_gradients import STANDS_FOR, gradients_dropped
from hybridremat.compiler.random_states import random_states_restored
from hybridremat.compiler.sample_inputs import is_strided
from hybridremat.errors import ModelError
from hybridremat.graph.private_torch import change_count, gradient_hooks

Unseen = set[int]
"""Identities of buffers and parameters that a trial run has changed, and no version counter tells.

That is so where a forward writes to ``.data``, and of the statistics of a BatchNorm that runs op by op.
"""


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[Unseen]:
    """Restore gradients, buffers and random states at exit.

    Inside, parameters have no gradients, and their hooks do not run. Gradients that leave early are dropped.
    """
    unseen: Unseen = set()
    with ExitStack() as stack:
        for each in (_without_gradients, _without_hooks):
            stack.enter_context(each(model))
        stack.enter_context(_buffers_restored(model, unseen))
        stack.enter_context(random_states_restored(cuda=torch.cuda.is_available()))
        stack.enter_context(gradients_dropped(model.parameters()))
        yield unseen


Gathered = Callable[[Tensor], Tensor]
"""Makes of a parameter what a sharded model gathers, perhaps the same memory."""


@contextmanager
def preserve_state_and_parameters(
    model: nn.Module, gathered: Gathered | None = None, *, on_paper: bool = False
) -> Iterator[Unseen]:
    """As :func:`preserve_state`, and restore parameters too.

    Inside, other parameters of the same memory take their places, so that no backward reaches them; or
    what ``gathered`` makes of them, as a sharded model gathers them. ``on_paper``: no op runs inside, so
    that nothing can change them.

    Raises
    ------
    ModelError
        If a parameter that was not copied has changed (see :func:`_parameter_snapshots`).
    """
    with preserve_state(model) as unseen:
        restored = nullcontext() if on_paper else _parameters_restored(model, unseen)
        with restored, _stand_ins(model, gathered):
            yield unseen


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Empty the dictionaries of hooks that autograd reads; handles stay valid."""
    hooks = [(found, dict(found)) for parameter in model.parameters() for found in gradient_hooks(parameter)]
    for found, _ in hooks:
        found.clear()
    try:
        yield
    finally:
        for found, before in hooks:
            found.clear()
            found.update(before)


@contextmanager
def _buffers_restored(model: nn.Module, unseen: Unseen) -> Iterator[None]:
    """Restore the values of buffers, and the tensors that modules hold."""
    kept = [
        (module, name, _Snapshot.of(buffer) if buffer is not None else None)
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, before in kept:
            module._buffers[name] = before.restored(unseen) if before is not None else None


@dataclass(frozen=True)
class _Snapshot:
    """A tensor, its memory, its version counter, and a copy of its values unless that costs too much."""

    tensor: Tensor
    memory: Tensor
    changes: int
    copy: Tensor | None

    @staticmethod
    def of(tensor: Tensor, *, copied: bool = True) -> _Snapshot:
        copy = tensor.detach().clone() if copied else None
        return _Snapshot(tensor, tensor.data, change_count(tensor), copy)

    def restored(self, unseen: Unseen) -> Tensor:
        """Restore the tensor; without a change it is not written to, as a later backward may read it.

        A change that its version counter does not tell is added to ``unseen``.
        """
        strided, counted = is_strided(self.tensor), change_count(self.tensor) != self.changes
        moved = strided and self.tensor.data_ptr() != self.memory.data_ptr()
        same = self.copy is None or (strided and torch.equal(self.memory, self.copy))
        if moved:
            self.tensor.data = self.memory
        if self.copy is not None and not same:
            self.memory.copy_(self.copy)
        if strided and not counted and (moved or not same):
            unseen.add(id(self.tensor))
        return self.tensor

    @property
    def lost(self) -> bool:
        """Whether the values have changed and there is no copy."""
        return self.copy is None and change_count(self.tensor) != self.changes


@contextmanager
def _parameters_restored(model: nn.Module, unseen: Unseen) -> Iterator[None]:
    kept = _parameter_snapshots(model)
    try:
        yield
    finally:
        for before in kept.values():
            before.restored(unseen)
    lost = [name for name, before in kept.items() if before.lost]
    if lost:
        raise _not_restored(model, lost)


def _parameter_snapshots(model: nn.Module) -> dict[str, _Snapshot]:
    """Snapshots with copies of trained parameters, and of frozen ones unless these take more bytes."""
    parameters = {name: p for name, p in model.named_parameters() if not is_lazy(p)}
    frozen = [p for p in parameters.values() if not p.requires_grad]
    trained = [p for p in parameters.values() if p.requires_grad]
    copy_frozen = _bytes(frozen) <= _bytes(trained)
    return {
        name: _Snapshot.of(p, copied=is_strided(p) and (copy_frozen or p.requires_grad))
        for name, p in parameters.items()
    }


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _not_restored(model: nn.Module, names: Sequence[str]) -> ModelError:
    few = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return ModelError(
        f"the forward of {type(model).__name__} changes frozen parameters in place ({few}). It has been run "
        "on the sample inputs, and these parameters are not as they were: frozen parameters that take more "
        "than the trained ones are not copied. Load their values again, and make them buffers "
        "(register_buffer), which are restored, or change them outside of the forward."
    )


@contextmanager
def _stand_ins(model: nn.Module, gathered: Gathered | None) -> Iterator[None]:
    """Put parameters of the same memory into the modules, away from gradients and DDP's hooks.

    Parameters of a subclass stay.
    """
    shadows: dict[int, nn.Parameter] = {}
    with ExitStack() as back:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if type(parameter) is nn.Parameter and (parameter.requires_grad or gathered is not None):
                    shadow = shadows.get(id(parameter))
                    if shadow is None:
                        stored = parameter.detach() if gathered is None else gathered(parameter.detach())
                        shadow = nn.Parameter(stored, requires_grad=parameter.requires_grad)
                        shadows[id(parameter)] = shadow
                        shadow.__dict__.update(parameter.__dict__)
                        setattr(shadow, STANDS_FOR, weakref.ref(parameter))
                    back.callback(module._parameters.__setitem__, name, parameter)
                    module._parameters[name] = shadow
        yield


def in_dtype(item: Any, dtype: torch.dtype | None) -> Any:
    """A tensor of floating-point numbers in another dtype; anything else as it is."""
    floats = dtype is not None and isinstance(item, Tensor) and item.is_floating_point()
    return item.to(dtype) if floats else item

"""Restore a model's state after it has been run on sample inputs, and notice what its own code changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybridremat.compiler.sample_inputs import is_plain
from hybridremat.errors import ModelError
from hybridremat.graph.private_torch import _disable_current_modes, change_count, gradient_hooks


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Gradients, buffers and generators come back as they were.

    Inside, no parameter has a gradient, and hooks of parameters do not run.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    random = torch.random.fork_rng(devices=devices)
    with _gradients_apart(model), _hooks_apart(model), _buffers_kept(model), random:
        yield


@contextmanager
def preserve_state_and_parameters(model: nn.Module) -> Iterator[None]:
    """As :func:`preserve_state`, and parameters come back too, whatever the forward does to them.

    Parameters have stand-ins of the same memory inside, so that a backward reaches none of them.

    Raises
    ------
    ModelError
        If a parameter that was not copied has changed (see :func:`_kept_parameters`).
    """
    with preserve_state(model), _parameters_kept(model), _stand_ins(model):
        yield


@contextmanager
def _gradients_apart(model: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _hooks_apart(model: nn.Module) -> Iterator[None]:
    """Take the hooks out of the dictionaries that autograd looks into; handles stay good."""
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
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Values come back, and the tensors themselves where a module has been given others."""
    kept = [
        (module, name, _Snapshot.of(buffer) if buffer is not None else None)
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, before in kept:
            module._buffers[name] = before.back() if before is not None else None


@dataclass(frozen=True)
class _Snapshot:
    """A tensor, its memory, and how often it had changed; with a copy of its values or without."""

    tensor: Tensor
    memory: Tensor
    changes: int
    copy: Tensor | None

    @staticmethod
    def of(tensor: Tensor, *, copied: bool = True) -> _Snapshot:
        copy = tensor.detach().clone() if copied else None
        return _Snapshot(tensor, tensor.data, change_count(tensor), copy)

    def back(self) -> Tensor:
        """The tensor as it was; not written to if nothing has changed, as a waiting backward may read it."""
        plain = is_plain(self.tensor)
        if plain and self.tensor.data_ptr() != self.memory.data_ptr():
            self.tensor.data = self.memory
        if self.copy is not None and not (plain and torch.equal(self.memory, self.copy)):
            self.memory.copy_(self.copy)
        return self.tensor

    @property
    def lost(self) -> bool:
        """Whether the values have changed with no copy of them."""
        return self.copy is None and change_count(self.tensor) != self.changes


@contextmanager
def _parameters_kept(model: nn.Module) -> Iterator[None]:
    kept = _kept_parameters(model)
    try:
        yield
    finally:
        for before in kept.values():
            before.back()
    lost = [name for name, before in kept.items() if before.lost]
    if lost:
        raise _lost(model, lost)


def _kept_parameters(model: nn.Module) -> dict[str, _Snapshot]:
    """Copies of trained parameters, as large as their gradients, and of at most as many frozen bytes."""
    parameters = {name: p for name, p in model.named_parameters() if not is_lazy(p)}
    frozen = [p for p in parameters.values() if not p.requires_grad]
    trained = [p for p in parameters.values() if p.requires_grad]
    all_of_them = _bytes(frozen) <= _bytes(trained)
    return {
        name: _Snapshot.of(p, copied=is_plain(p) and (all_of_them or p.requires_grad))
        for name, p in parameters.items()
    }


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _lost(model: nn.Module, names: Sequence[str]) -> ModelError:
    few = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return ModelError(
        f"the forward of {type(model).__name__} changes frozen parameters in place ({few}). It has been run "
        "on the sample inputs, and these parameters are not as they were: frozen parameters that take more "
        "than the trained ones are not copied before. Load their values again, and make them buffers "
        "(register_buffer), which come back, or change them outside of the forward."
    )


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Put parameters of the same memory into the modules: gradients, and DDP's hooks, stay with the real.

    Parameters of a class of their own stay where they are.
    """
    shadows: dict[int, nn.Parameter] = {}
    with ExitStack() as back:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if type(parameter) is nn.Parameter and parameter.requires_grad:
                    shadow = shadows.get(id(parameter))
                    if shadow is None:
                        shadow = shadows[id(parameter)] = nn.Parameter(parameter.detach())
                        shadow.__dict__.update(parameter.__dict__)
                    back.callback(module._parameters.__setitem__, name, parameter)
                    module._parameters[name] = shadow
        yield


def watch(tensors: Iterable[torch.Tensor]) -> Callable[[], bool]:
    """A function that says whether, since now, no tensor was written to and no random number drawn."""
    watched = tuple(tensors)

    def marks() -> Hashable:
        return _random_states(), tuple(map(change_count, watched))

    before = marks()
    return lambda: marks() == before


def _random_states() -> tuple[bytes, ...]:
    with _disable_current_modes():  # asked in the middle of a compile, too
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states += torch.cuda.get_rng_state_all()
        return tuple(state.numpy().tobytes() for state in states)

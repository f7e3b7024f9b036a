"""Random generators that a model draws from, restored: PyTorch's, Python's and NumPy's global one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hybridremat.graph.private_torch import _disable_current_modes


def python_states() -> tuple[Any, Any]:
    """The states of Python's generator and of NumPy's global one, from which layers are dropped, too."""
    return random.getstate(), np.random.get_state()


def set_python_states(states: tuple[Any, Any]) -> None:
    """Draw again what was drawn since ``states`` were taken."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def torch_generators() -> tuple[torch.Generator, ...]:
    """Copies of PyTorch's generators: the CPU's, and those of CUDA's devices once it runs.

    A copy takes nothing of the allocator's memory, as a state that is read does.
    """
    return tuple(each.clone_state() for each in _generators())


def have_drawn(before: Sequence[torch.Generator]) -> bool:
    """Whether PyTorch's generators have drawn since ``before``."""
    with _disable_current_modes():  # also called in the middle of a compilation
        pairs = zip(_generators(), before, strict=False)
        return any(not torch.equal(now.get_state(), then.get_state()) for now, then in pairs)


def draw_again(before: Sequence[torch.Generator]) -> None:
    """Draw again what was drawn since ``before``."""
    for now, then in zip(_generators(), before, strict=False):
        now.set_state(then.get_state())


def _generators() -> tuple[torch.Generator, ...]:
    runs = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.default_generator, *(torch.cuda.default_generators if runs else ())


@contextmanager
def random_states_restored(*, cuda: bool) -> Iterator[None]:
    """Make every generator at exit what it was; with ``cuda`` those of all its devices, too."""
    devices = list(range(torch.cuda.device_count())) if cuda else []
    states = python_states()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            set_python_states(states)

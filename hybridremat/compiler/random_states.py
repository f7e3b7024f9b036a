"""Random generators that a model draws from, restored: PyTorch's, Python's and NumPy's global one."""

from __future__ import annotations

import random
from collections.abc import Iterator
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


def torch_states() -> tuple[bytes, ...]:
    """The states of PyTorch's generators: the CPU's, and those of CUDA's devices once it runs."""
    with _disable_current_modes():  # also called in the middle of a compilation
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states += torch.cuda.get_rng_state_all()
        return tuple(state.numpy().tobytes() for state in states)


def set_torch_states(states: tuple[bytes, ...]) -> None:
    """Draw again what was drawn since ``states`` were taken."""
    cpu, *cuda = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in states)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


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

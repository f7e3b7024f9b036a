"""Notice what a model's own code changes before the first of its graphs runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch

from hybridremat.graph.private_torch import _disable_current_modes, change_count


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

"""What a forward has changed since it started, so that it can run again from there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridremat.compiler.random_states import (
    draw_again,
    have_drawn,
    python_states,
    set_python_states,
    torch_generators,
)
from hybridremat.compiler.sample_inputs import is_strided
from hybridremat.graph.private_torch import change_count


@dataclass
class ForwardStart:
    """Tells what a forward has changed since it started, and lets it draw the same random numbers again.

    Attributes
    ----------
    model
        Whose forward it is; None once nothing is held any more.
    inputs
        The tensors among its inputs.
    there
        Those, parameters and buffers, each with its address and how often it had been written to.
    drawn
        PyTorch's random generators as they were.
    elsewhere
        The states of Python's and NumPy's.
    """

    model: nn.Module | None
    inputs: list[Tensor]
    there: list[tuple[Tensor, int, int]]
    drawn: tuple[torch.Generator, ...]
    elsewhere: tuple[Any, Any]

    @staticmethod
    def now(model: nn.Module, inputs: list[Tensor]) -> ForwardStart:
        """The forward starts."""
        return ForwardStart(model, inputs, _there(model, inputs), torch_generators(), python_states())

    @property
    def has_written(self) -> bool:
        """Whether one of the tensors has been written to, or another is in its place."""
        if self.model is None:
            return True
        there = _there(self.model, self.inputs)
        pairs = zip(self.there, there, strict=False)
        same = all(before[0] is now[0] and before[1:] == now[1:] for before, now in pairs)
        return not same or len(there) != len(self.there)

    @property
    def has_changed_nothing(self) -> bool:
        """Whether none has been written to, and no random number of PyTorch's drawn."""
        return not self.has_written and not have_drawn(self.drawn)

    def let_go(self) -> None:
        """Hold the tensors no longer; they count as written to then."""
        self.model = None
        self.inputs, self.there = [], []

    def draw_again(self) -> None:
        """Make random generators what they were."""
        draw_again(self.drawn)
        set_python_states(self.elsewhere)


def _there(model: nn.Module, inputs: Iterable[Tensor]) -> list[tuple[Tensor, int, int]]:
    tensors = (*model.parameters(), *model.buffers(), *inputs)
    return [(each, each.data_ptr() if is_strided(each) else 0, change_count(each)) for each in tensors]

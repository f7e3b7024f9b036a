"""A model and the sample inputs of one training step, as a caller's function returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hybridremat.errors import TargetError

RETURNS = "return (model, kwargs) or (model, args, kwargs), what one training step passes"


@dataclass(frozen=True)
class SampleStep:
    """A model, and the sample inputs of one training step."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def sample_step(made: object, text: str) -> SampleStep:
    """The model and inputs that a function returned; ``text`` names the function in messages.

    Raises
    ------
    TargetError
        If it is not ``(model, kwargs)`` or ``(model, args, kwargs)``.
    """
    parts = made if isinstance(made, tuple) else ()
    if len(parts) == 2:
        parts = (parts[0], (), parts[1])
    if (
        len(parts) != 3
        or not isinstance(parts[0], nn.Module)
        or not isinstance(parts[1], tuple | list)
        or not isinstance(parts[2], Mapping)
    ):
        raise TargetError(f"{text} should {RETURNS}; it returned {_described(made)}")
    return SampleStep(*parts)


def _described(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__

"""What the command line plans: a built-in model by name, or a user's function that makes one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hybridremat.errors import TargetError
from hybridremat.zoo import REFERENCE_MODELS, reference_model

_RETURNS = "return (model, kwargs) or (model, args, kwargs), what one training step passes"


@dataclass(frozen=True)
class Target:
    """A model, and the sample inputs of one training step."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def load_target(text: str, *, dropout: float = 0.0, changes: Mapping[str, Any] | None = None) -> Target:
    """Make the model that ``text`` names: ``gpt2``, ``package.module:function`` or ``path/file.py:function``.

    Parameters
    ----------
    dropout
        Of built-in models.
    changes
        Keyword arguments of the function. For a built-in model ``batch`` alone: how many samples it is given.

    Raises
    ------
    TargetError
        If there is no such model, module or function, it does not take what is changed, or it returns
        something else.
    """
    if text in REFERENCE_MODELS:
        model, batch = reference_model(text, dropout)
        return Target(model, (), batch if not changes else _of_size(batch, changes["batch"]))
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(
            f"{text!r} is no built-in model ({', '.join(REFERENCE_MODELS)}) and does not name a function: "
            "give module:function or file.py:function"
        )
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise TargetError(f"{place} has no function {name!r}; it should {_RETURNS}")
    _require_parameters(function, text, changes or {})
    return target_of(function(**(changes or {})), text)


def _of_size(batch: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """As many samples as asked for: those of the batch, over and over."""
    return {name: tensor[torch.arange(size) % len(tensor)] for name, tensor in batch.items()}


def _require_parameters(function: Callable[..., Any], text: str, given: Mapping[str, object]) -> None:
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        takes = f"an argument named {' and '.join(given)}" if given else "no argument"
        raise TargetError(f"{text} should take {takes} ({error}), and {_RETURNS}") from error
    except ValueError:
        return  # it has no signature to read: the call will tell


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return _by_name(place)
    path = Path(place)
    if not path.is_file():
        raise TargetError(f"there is no file {place}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles of the file's classes look it up
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _by_name(place: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # found, but something that it needs is missing: its own traceback says more
        raise TargetError(f"there is no module {place!r} here or among the installed packages") from error


def target_of(made: object, text: str) -> Target:
    """Read what a function returned; ``text`` is what messages call the function.

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
        raise TargetError(f"{text} should {_RETURNS}; it returned {_described(made)}")
    return Target(*parts)


def _described(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__

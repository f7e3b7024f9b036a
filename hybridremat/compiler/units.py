"""Units of a step: submodules whose calls are captured and planned; the model around them runs as it is.

One function runs all of them, and takes the module as an argument: Dynamo captures it once for modules that
are alike, with their parameters as inputs, so equal layers share capture and plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import SLOT, forget_with
from hybridremat.errors import CaptureError, ModelError
from hybridremat.graph.private_torch import saved_tensor_hooks_are_set

logger = logging.getLogger(__name__)

_SHOWN: Final = 5  # names that an error shows


def find_units(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that patterns name (globs; ``*`` matches dots too), without those inside of others.

    Raises
    ------
    ModelError
        If a pattern matches nothing, or only modules inside of units, or a container that is never called.
    """
    names = {name: module for name, module in model.named_modules() if name}
    matched = {pattern: [n for n in names if fnmatchcase(n, pattern)] for pattern in patterns}
    every = {name for found in matched.values() for name in found}
    outermost = {name for name in names if name in every and not _is_inside(name, every)}
    for pattern, found in matched.items():
        if not found:
            near = _near(pattern, names)
            raise ModelError(f"units: {pattern!r} matches no module of {type(model).__name__}; {near}")
        if outermost.isdisjoint(found):
            raise ModelError(
                f"units: all that {pattern!r} matches is inside of other units ({found[0]!r}, for one), and "
                "units cannot be nested. Leave one of the patterns out."
            )
    for name in outermost:
        if isinstance(names[name], (nn.ModuleList, nn.ModuleDict)):
            raise ModelError(
                f"units: {name!r} is a {type(names[name]).__name__}, which is never called itself. Name what "
                f'is in it: units="{name}.*"'
            )
    return {name: names[name] for name in names if name in outermost}


def _is_inside(name: str, others: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in others for count in range(1, len(parts)))


def _near(pattern: str, names: dict[str, nn.Module]) -> str:
    kinds = nn.ModuleList, nn.Sequential
    lists = [f"{name}.*" for name, module in names.items() if isinstance(module, kinds)]
    close = get_close_matches(pattern, [*lists, *names], _SHOWN, cutoff=0.5)
    close = close or (lists or list(names))[:_SHOWN]
    return f"there are {', '.join(map(repr, close))}" if close else "it has no submodules"


def compile_units(
    model: nn.Module, units: dict[str, nn.Module], backend: Backend, *, shared: bool
) -> Callable[..., Any]:
    """The model's call with its units compiled by ``backend``, which takes several graphs.

    ``shared``: whether those that are alike share a capture, in which modules have the names of the first.
    """
    one = _compiled(model, backend)
    compiled = {name: one if shared else _compiled(model, backend) for name in units}
    told: set[str] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        ran: set[str] = set()
        with _calls(units, compiled, backend, ran):
            output = model._call_impl(*args, **kwargs)
        _notice(model, units, ran, told)
        return output

    return run


def _compiled(model: nn.Module, backend: Backend) -> Callable[..., Any]:
    """Runs a module with its arguments, compiled."""

    def run_unit(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    code = run_unit.__code__.replace(co_name=f"run_unit_of_{type(model).__name__}")
    fresh = FunctionType(code, run_unit.__globals__)  # code that Dynamo compiled is kept by code object
    forget_with(fresh, backend)
    compiled: Callable[..., Any] = torch.compile(fresh, backend=backend, dynamic=False, fullgraph=False)
    return compiled


@contextmanager
def _calls(
    units: dict[str, nn.Module],
    compiled: dict[str, Callable[..., Any]],
    backend: Backend,
    ran: set[str],
) -> Iterator[None]:
    """Let the units run compiled; ``ran``: the names of those that do."""

    def call_of(name: str, unit: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if saved_tensor_hooks_are_set():
                raise CaptureError(
                    f"the unit {name!r} runs inside of torch.utils.checkpoint, or of other hooks on what is "
                    "saved for the backward, which would run it again or move what it saves. Turn that off "
                    "(model.gradient_checkpointing_disable(), for one): the plan decides what is recomputed."
                )
            ran.add(name)
            backend.unit = name
            return compiled[name](unit, args, kwargs)

        return call

    before = {name: getattr(unit, SLOT) for name, unit in units.items()}
    for name, unit in units.items():
        setattr(unit, SLOT, call_of(name, unit))
    try:
        yield
    finally:
        for name, unit in units.items():
            if before[name] is None:
                delattr(unit, SLOT)
            else:
                setattr(unit, SLOT, before[name])


def _notice(model: nn.Module, units: dict[str, nn.Module], ran: set[str], told: set[str]) -> None:
    """Refuse a step in which no unit has run, and tell of those that have not, once."""
    if not ran:
        raise CaptureError(
            f"none of the {len(units)} units of {type(model).__name__} was called in its forward "
            f"({next(iter(units))!r}, for one). Name modules that are called: model.layer(x), not "
            "model.layer.forward(x)."
        )
    missing = units.keys() - ran - told
    if missing:
        told |= missing
        names = ", ".join(sorted(missing)[:_SHOWN])
        logger.info("%d units of %s have not run: %s", len(missing), type(model).__name__, names)

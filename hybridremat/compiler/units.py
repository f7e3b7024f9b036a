"""Units of a step: submodules whose calls are captured one by one, and what runs between them.

One function runs all of them, and takes the module as an argument: Dynamo captures it once for modules that
are alike, with their parameters as inputs, so equal layers share capture and plan. What runs between them
(embeddings, a head, a loss) Dynamo captures as of a model whose graph breaks at each unit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from types import FunctionType
from typing import Any, Final, TypeVar

import torch
from torch import nn

from hybridremat.compiler.backend import UNIT, Backend
from hybridremat.compiler.capture import compile_step, settled
from hybridremat.compiler.forgetting import compiled_for
from hybridremat.compiler.model_state import in_dtype
from hybridremat.errors import CaptureError, ModelError
from hybridremat.graph.private_torch import saved_tensor_hooks_are_set, tree_map

logger = logging.getLogger(__name__)

T = TypeVar("T")
Dtypes = tuple[torch.dtype | None, torch.dtype | None]

_FORWARD: Final = "forward"
_SHOWN: Final = 5  # names that an error shows


def find_units(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that patterns name (globs; ``*`` matches dots too), without those inside of others.

    Raises
    ------
    ModelError
        If a pattern matches nothing, or only modules inside of units, or a container that is never called,
        or TorchScript.
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
        if isinstance(names[name], torch.jit.ScriptModule):
            raise ModelError(
                f"units: {name!r} is TorchScript, which PyTorch does not capture. Put in its place what it "
                "was made of (the module before torch.jit.script or torch.jit.trace), or name the others "
                "alone: it then runs as it is, between them."
            )
    return {name: names[name] for name in names if name in outermost}


def units_in(model: nn.Module) -> dict[str, nn.Module]:
    """The submodules that a module may call itself: in place of containers what is in them."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found |= {f"{name}.{inner}": each for inner, each in units_in(child).items()}
        else:
            found[name] = child
    return found


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
    model: nn.Module,
    units: dict[str, nn.Module],
    backend: Backend,
    *,
    shared: bool,
    rest: bool,
    required: bool = True,
    dtypes: Dtypes = (None, None),
) -> Callable[..., Any]:
    """The model's call with its units compiled by ``backend``, which takes several graphs.

    Parameters
    ----------
    shared
        Whether those that are alike share a capture, in which modules have the names of the first.
    rest
        Whether what runs between the units is captured as well, as far as Dynamo can; else it runs as it is.
    required
        Whether a forward is refused as long as none of the units has run in any.
    dtypes
        Of what the model and its units are called with, and of what they return, as FSDP2 makes it; None for
        what it is.
    """
    one, ran, told, ever = _compiled(model, backend), set[str](), set[str](), set[str]()
    alike = one if shared else None
    made = [_Unit(name, unit, model, backend, ran, alike, dtypes) for name, unit in units.items()]
    given, returned = dtypes
    calls = [(unit, _opaque(unit)) for unit in made]
    backend.captures_rest = rest
    call = compile_step(model, backend) if rest else model._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        ran.clear()
        backend.calls.clear()
        with _installed(calls):
            output = call(*_in_dtype(args, given), **_in_dtype(kwargs, given))
        ever.update(ran)
        if required and not ever:
            raise _never_called(model, units)
        _notice(model, units, ran, told)
        return _in_dtype(output, returned)

    return run


def _compiled(model: nn.Module, backend: Backend, *, own: bool = False) -> Callable[..., Any]:
    """Runs a module's forward with its arguments, compiled; ``own``: one that is put on an instance."""

    def run_unit(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    def run_own(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    run = run_own if own else run_unit
    code = run.__code__.replace(co_name=f"run_unit_of_{type(model).__name__}")
    fresh = FunctionType(code, run.__globals__, closure=run.__closure__)  # Dynamo keeps code by code object
    return settled(compiled_for(backend, fresh, dynamic=False, fullgraph=False))


@dataclass
class _Unit:
    """A unit of a model, and what runs in place of its forward while the model runs.

    Attributes
    ----------
    ran
        The names of the units that have run.
    alike
        Runs the class's forward of all units, which share captures; None: the unit has captures of its own.
    dtypes
        Of its inputs and of its outputs; None for theirs.
    running
        In a forward of the model: what ``own`` was when it began.
    """

    name: str
    module: nn.Module
    model: nn.Module
    backend: Backend
    ran: set[str]
    alike: Callable[..., Any] | None
    dtypes: Dtypes = (None, None)
    running: Callable[..., Any] | None = None

    @property
    def own(self) -> Callable[..., Any] | None:
        """The forward that somebody has put on the instance, at any time; None: it has its class's."""
        found: Callable[..., Any] | None = vars(self.module).get(_FORWARD)
        return found

    def put(self, forward: Callable[..., Any] | None) -> None:
        """Give the instance a forward; None: that of its class."""
        if forward is not None:
            setattr(self.module, _FORWARD, forward)
        elif self.own is not None:
            delattr(self.module, _FORWARD)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run it compiled."""
        if saved_tensor_hooks_are_set():
            raise CaptureError(
                f"the unit {self.name!r} runs inside of torch.utils.checkpoint, or of other hooks on what is "
                "saved for the backward, which would run it again or move what it saves. Turn that off "
                "(model.gradient_checkpointing_disable(), for one): the plan decides what is recomputed."
            )
        given, returned = self.dtypes
        args, kwargs = _in_dtype((args, kwargs), given)
        self.ran.add(self.name)
        self.backend.unit = self.name
        self.backend.calls.append(self.name)
        try:
            if self.running is not None:
                return _in_dtype(self._compiled_own(self.running, args, kwargs), returned)
            return _in_dtype(self._compiled_class(self.module, args, kwargs), returned)
        finally:
            self.backend.unit = ""

    @cached_property
    def _compiled_own(self) -> Callable[..., Any]:
        return _compiled(self.model, self.backend, own=True)

    @cached_property
    def _compiled_class(self) -> Callable[..., Any]:
        return self.alike or _compiled(self.model, self.backend)


def _opaque(unit: _Unit) -> Callable[..., Any]:
    """The forward of a unit, which Dynamo does not look into."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return unit.run(args, kwargs)

    opaque: Callable[..., Any] = torch.compiler.disable(forward, reason=UNIT)
    return opaque


def _in_dtype(inputs: T, dtype: torch.dtype | None) -> T:
    """Inputs as FSDP2 casts them before it calls a module, or outputs after it."""
    return inputs if dtype is None else tree_map(lambda item: in_dtype(item, dtype), inputs)


@contextmanager
def _installed(calls: Iterable[tuple[_Unit, Callable[..., Any]]]) -> Iterator[None]:
    """Let units run compiled for the time of one forward, which may call the model again."""
    covered = [(unit, opaque) for unit, opaque in calls if unit.own is not opaque]
    for unit, opaque in covered:
        unit.running = unit.own
        unit.put(opaque)
    try:
        yield
    finally:
        for unit, opaque in covered:
            if unit.own is opaque:  # else it has been given another meanwhile
                unit.put(unit.running)
            unit.running = None


def _never_called(model: nn.Module, units: dict[str, nn.Module]) -> CaptureError:
    """The error for units of which none has run in any forward."""
    return CaptureError(
        f"none of the {len(units)} units of {type(model).__name__} was called in its forward "
        f"({next(iter(units))!r}, for one). Name modules whose forward runs."
    )


def _notice(model: nn.Module, units: dict[str, nn.Module], ran: set[str], told: set[str]) -> None:
    """Tell of units that have not run, once."""
    missing = units.keys() - ran - told
    if missing:
        told |= missing
        names = ", ".join(sorted(missing)[:_SHOWN])
        logger.info("%d units of %s have not run: %s", len(missing), type(model).__name__, names)

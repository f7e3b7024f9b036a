"""Find units where a forward, or a part of it, is not captured: the largest submodules that can be.

Where a graph breaks in a loop, ``with`` or ``try``, Dynamo gives up on the function that holds it, and what
this calls is captured only if it is code of the user's own: modules of PyTorch's run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.parts_beside import has_several_ops, patterns_of
from hybridremat.compiler.units import compile_units, units_in
from hybridremat.errors import CaptureError
from hybridremat.planning.breaks.survey import Survey

Trial = Callable[[Backend, Callable[..., Any]], AbstractContextManager[Callable[[], Any]]]
"""Yields the forward of a compiled call, on copies."""


def beside_graphs(model: nn.Module, found: Survey) -> dict[str, nn.Module]:
    """The largest submodules with parameters that only code between graphs reads, and those that are alike.

    A module with parameters of its own alone is left as it is: of a linear layer there is nothing to plan.
    Alike are those of the same class of which nothing has run: another forward may call them. Empty if there
    are none of the first kind.
    """
    eager, idle = dict[str, nn.Module](), dict[str, nn.Module]()
    waiting = units_in(model)
    while waiting:
        name, module = waiting.popitem()
        trained = {id(each) for each in module.parameters() if each.requires_grad}
        if not trained or not has_several_ops(module):
            continue
        if trained & found.given:
            waiting |= {f"{name}.{key}": each for key, each in units_in(module).items()}
        elif trained & found.leaves:
            eager[name] = module
        else:
            idle[name] = module
    kinds = {type(each) for each in eager.values()}
    units = eager | {name: each for name, each in idle.items() if type(each) in kinds}
    return {name: each for name, each in model.named_modules() if name in units}


def own_units(
    model: nn.Module,
    units: dict[str, nn.Module],
    survey: Callable[[], tuple[Survey, Backend]],
    trial: Trial,
) -> tuple[str, ...]:
    """Patterns for the largest of some submodules of which graphs can be captured; empty if there are none.

    Each is called by itself, in a forward without gradients; one of which nothing is captured makes way for
    what is in it. ``survey`` makes a survey and its backend for one such forward.
    """
    idle = dict[str, nn.Module]()
    while units:
        trying, backend = survey()
        call = compile_units(model, units, backend, shared=True, rest=False, required=False)
        try:
            with trial(backend, call) as run:
                run()
        except CaptureError:
            return ()
        idle |= {name: each for name, each in units.items() if name not in backend.calls}
        bare = [name for name in units if name not in trying.units and any(units[name].children())]
        if not bare:
            break
        inside = {f"{name}.{key}": each for name in bare for key, each in units_in(units[name]).items()}
        units = {name: each for name, each in units.items() if name not in bare} | inside
    if not units:
        return ()
    found = [name for name in units if name in trying.units]
    return patterns_of(model, [*found, *_left_out(model, idle, found)])


def _left_out(model: nn.Module, idle: dict[str, nn.Module], found: list[str]) -> list[str]:
    """Submodules that this forward has not called, and another one may: units as those that are alike.

    Those of a class that no unit is of, and that none is inside of, are units themselves.
    """
    named, left = dict(model.named_modules()), list[str]()
    for name, module in idle.items():
        trained = any(parameter.requires_grad for parameter in module.parameters())
        inside = any(name.startswith(f"{other}.") for other in left)
        if not trained or inside or any(each == name or each.startswith(f"{name}.") for each in found):
            continue
        alike = (other for other, each in named.items() if type(each) is type(module) and other != name)
        within = next((parts for other in alike if (parts := _within(other, found))), [""])
        left += [f"{name}{part}" for part in within if f"{name}{part}" in named]
    return left


def _within(name: str, found: list[str]) -> list[str]:
    """The units that a module is or has in it, by their names from there on."""
    return [each[len(name) :] for each in found if each == name or each.startswith(f"{name}.")]

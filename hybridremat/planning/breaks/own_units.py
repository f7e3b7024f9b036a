"""Find units where nothing of a forward can be captured: the largest submodules of which something can."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.parts_beside import patterns_of
from hybridremat.compiler.units import compile_units, units_in
from hybridremat.errors import CaptureError
from hybridremat.planning.breaks.survey import Survey

Trial = Callable[[Backend, Callable[..., Any]], AbstractContextManager[Callable[[], Any]]]
"""Yields the forward of a compiled call, on copies."""


def own_units(
    model: nn.Module, survey: Callable[[], tuple[Survey, Backend]], trial: Trial
) -> tuple[str, ...]:
    """Patterns for the largest submodules of which graphs can be captured; empty if there are none.

    Each is called by itself, in a forward without gradients; one of which nothing is captured makes way for
    what is in it. ``survey`` makes a survey and its backend for one such forward.
    """
    units = units_in(model)
    while units:
        trying, backend = survey()
        call = compile_units(model, units, backend, shared=True, rest=False)
        try:
            with trial(backend, call) as run:
                run()
        except CaptureError:
            return ()
        bare = [name for name in units if name not in trying.units and any(units[name].children())]
        if not bare:
            break
        inside = {f"{name}.{key}": each for name in bare for key, each in units_in(units[name]).items()}
        units = {name: each for name, each in units.items() if name not in bare} | inside
    return patterns_of(model, [name for name in units if name in trying.units]) if units else ()

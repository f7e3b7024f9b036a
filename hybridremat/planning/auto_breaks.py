"""Steps that cannot be captured as one graph, where nobody has said what to do then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from torch import nn

from hybridremat.compiler.capture_errors import TRAINS_PLAINLY
from hybridremat.errors import CaptureError, GraphBreakWarning, InfeasibleLimitError, InputError, warn_caller
from hybridremat.planning.settings import Settings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class BesideGraphsError(CaptureError):
    """Submodules run between the graphs of a step, and could be units. Never leaves hybridremat."""


def with_breaks(model: nn.Module, settings: Settings, run: Callable[[Settings], _T]) -> _T:
    """Call ``run`` with settings for one graph, and where that cannot be captured, for several.

    Where nothing of the model's own forward can be captured, these are those of its largest parts. Where
    parts of it run between graphs, they are graphs of their own, if that can be planned.

    Raises
    ------
    CaptureError
        If several graphs cannot be captured either: why one cannot.
    """
    if settings.graph_breaks != "auto" or settings.units or settings.spec is not None:
        return _with_own_units(settings, run)
    try:
        return run(settings)
    except (CaptureError, InputError) as error:  # the latter also where the model fails as it is traced alone
        whole = error
    name, place = type(model).__name__, getattr(whole, "place", "")
    try:
        found = _with_own_units(replace(settings, graph_breaks="plan"), run)
    except InfeasibleLimitError as error:
        text = f"{error} {name} is not one graph{place}."
        raise InfeasibleLimitError(text, limit=error.limit, least=error.least) from None
    except Exception as error:  # what the model itself raises, too, where it is the inputs that are wrong
        says_more = isinstance(whole, CaptureError) and not isinstance(error, CaptureError)
        if says_more or TRAINS_PLAINLY in str(error):  # nothing helps but what the second says
            raise
        raise whole from whole.__cause__
    warn_caller(
        f"{name} is not one graph{place}: its graphs are planned together. What "
        "crosses from one to the next is kept, and code between them is measured on these inputs, with the "
        "forward run on copies. Removing the break makes better plans; graph_breaks=\"plan\" says that this "
        'is meant, and graph_breaks="error" refuses it.',
        GraphBreakWarning,
    )
    return found


def _with_own_units(settings: Settings, run: Callable[[Settings], _T]) -> _T:
    try:
        return run(settings)
    except BesideGraphsError as error:
        if (by_units := _by_units(replace(settings, units=error.units), run)) is not None:
            return by_units
        return run(replace(settings, own_units=False))
    except CaptureError as error:
        if not error.units or settings.units:
            raise
        units = error.units
    logger.info("planned by units: %s", ", ".join(units))
    return run(replace(settings, units=units))


def _by_units(settings: Settings, run: Callable[[Settings], _T]) -> _T | None:
    """None if these units cannot be captured together, or not within the limit."""
    name = ", ".join(settings.units)
    try:
        found = run(settings)
    except (CaptureError, InfeasibleLimitError) as error:
        logger.info("not planned by units (%s), which run between graphs then: %s", name, error)
        return None
    logger.info("planned by units, as they would run between graphs: %s", name)
    return found

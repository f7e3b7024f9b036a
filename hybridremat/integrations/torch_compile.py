"""``torch.compile(model, backend="hybridremat", options={"memory_limit": "50%"})``.

PyTorch finds this backend by its entry point, without ``import hybridremat``. Errors raised here come out
of torch.compile wrapped in its ``BackendCompilerFailed``; ours is its ``inner_exception``.

:func:`hybridremat.wrap` does more: it plans before the first step, never recompiles, and accepts logging in
the model's code, which breaks the graph here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from hybridremat.errors import CaptureError, OptionsError
from hybridremat.graph.private_torch import specialize_floats
from hybridremat.integrations.symbolic_graphs import is_symbolic, symbolic_backend
from hybridremat.planning.context import PlanContext
from hybridremat.planning.origin import graph_origin
from hybridremat.planning.pipeline import backend_for
from hybridremat.planning.planner import choose_schedule
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.settings import SETTING_NAMES, Settings, did_you_mean
from hybridremat.runtime.in_flight import ForwardsInFlight

_OWN = ("dynamic",)  # an argument of torch.compile itself, which hands over one shape's graph at a time
OPTION_NAMES = (*(name for name in SETTING_NAMES if name not in _OWN), "on_plan", "progress")


def hybridremat_backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured into a planned training step.

    Parameters
    ----------
    options
        The settings of :func:`hybridremat.wrap` by name, ``progress``, and
        ``on_plan``, called with the :class:`~hybridremat.Plan` of each training graph once it is compiled,
        and with that of each further size of a graph with symbols before it first runs there.

    Raises
    ------
    OptionsError
        For an option that is not known, or a ``mode`` (there are none).
    LimitError
        For a limit, overhead or reserve that cannot be used, or neither limit nor overhead.
    InfeasibleLimitError
        If no plan fits.
    CaptureError
        If the graph breaks (before any of it has run), or has symbols for sizes and cannot be planned so.
    """
    settings, on_plan, show = read_options(mode, options or {})
    symbolic = any(map(is_symbolic, example_inputs))
    if symbolic:
        _require_symbols(settings)
        specialize_floats(module)
    started = time.perf_counter()
    with planning_progress(show=show) as progress:
        context = PlanContext.of(settings).at(graph_origin(example_inputs), progress)
        if symbolic:
            backend = symbolic_backend(context, on_plan)
        else:
            backend = backend_for(settings, partial(choose_schedule, context=context))
        graph = backend.capture(module, example_inputs)
        graph.plan()  # errors are to come before any of it has run
    context.store.note_total(time.perf_counter() - started, backend.compile_seconds)
    if on_plan is not None and context.store.current is not None:
        on_plan(context.store.current)
    in_flight = ForwardsInFlight(context, plans_again=False)

    def run(*args: Any) -> Any:
        outputs = graph(*args)
        in_flight.after_forward(outputs, several_graphs=False)
        return outputs

    return run


def read_options(
    mode: str | None, options: Mapping[str, Any]
) -> tuple[Settings, Callable[[Any], None] | None, bool]:
    """Settings, the callback ``on_plan`` and whether to show progress, from torch.compile's arguments."""
    if mode is not None:
        raise OptionsError(f"mode={mode!r}: the backend hybridremat has no modes; use options= alone")
    unknown = [name for name in options if name not in OPTION_NAMES]
    if unknown:
        raise OptionsError(
            f"options of the backend hybridremat that are not known: {', '.join(map(repr, unknown))}"
            f"{did_you_mean(unknown[0], OPTION_NAMES)} There are {', '.join(OPTION_NAMES)}"
        )
    given = dict(options)
    on_plan, show = given.pop("on_plan", None), bool(given.pop("progress", True))
    if on_plan is not None and not callable(on_plan):
        raise OptionsError(f"option on_plan={on_plan!r} is no function; it is called with the plan")
    if given.get("graph_breaks") == "plan":
        raise OptionsError(
            'graph_breaks="plan" needs hybridremat.wrap: torch.compile hands over one graph at a time, and '
            "the graphs of a step are planned together"
        )
    if given.get("units"):
        raise OptionsError("units= need hybridremat.wrap: torch.compile hands over graphs, and no modules")
    return Settings(**given).validated(need_limit=True), on_plan, show


def _require_symbols(settings: Settings) -> None:
    """Refuse symbols for sizes where a graph is to be captured for each shape by itself."""
    if why := settings.one_capture_refused():
        raise CaptureError(
            f"the graph has symbols for sizes, and with {why} each shape is captured by itself. "
            "torch.compile makes sizes symbols when a second shape arrives: pass torch.compile(…, "
            "dynamic=False), and each shape gets a graph and a plan of its own."
        )

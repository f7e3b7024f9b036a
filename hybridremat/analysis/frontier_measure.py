"""Run the plain step and some plans of a frontier in copies of the model, and measure them."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

from hybridremat.analysis.frontier_data import FrontierData, MeasuredPoint
from hybridremat.analysis.frontier_rows import evenly_spaced
from hybridremat.analysis.measure import LossFunction, Measurement, loss_of, measure
from hybridremat.analysis.paired_steps import Subject, time_ratio
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.compiler.model_state import preserve_state
from hybridremat.errors import ModelError
from hybridremat.planning.plan import Plan
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.settings import Settings
from hybridremat.plans.records import FrontierPoint
from hybridremat.plans.request import Compiler
from hybridremat.runtime.prepare import make_planned_call
from hybridremat.units import require_count

PAIRS = 3  # of a plain and a planned step, in turn: a machine that slows down slows both


def measure_points(
    frontier: FrontierData,
    plan_of: Callable[[FrontierPoint], Plan],
    step: SampleStep,
    *,
    count: int,
    loss_fn: LossFunction | None,
    compiler: Compiler,
    show: bool,
) -> tuple[MeasuredPoint, ...]:
    """The plain step, then ``count`` points by rising peak; ``plan_of`` makes the plan of a point.

    The plain step is compiled if the plans are.

    Errors are those of :meth:`hybridremat.Frontier.measured`.
    """
    require_count("count", count, "of points to be measured")
    points = evenly_spaced(frontier.points, count)
    with preserve_state(step.model), planning_progress(show=show) as report:
        report("measuring the plain step", 0, len(points) + 1)
        plain = Subject(_copy(step.model), step.kwargs, loss_fn or loss_of, step.args)
        if compiler == "inductor":
            plain.model.compile()
        figures = _measure(plain)
        found = [MeasuredPoint(None, figures.peak, figures.outside, figures.seconds, 0.0)]
        for number, point in enumerate(points, start=1):
            report("measuring plans", number, len(points) + 1)
            found.append(_measured(point, plan_of(point), plain, step.model))
    return tuple(found)


def _measured(point: FrontierPoint, plan: Plan, plain: Subject, model: nn.Module) -> MeasuredPoint:
    wrapped = _copy(model)
    make_planned_call(wrapped, plain.args, plain.batch, Settings(cache=False), plan=plan).install()
    planned = Subject(wrapped, plain.batch, plain.loss_fn, plain.args)
    figures = _measure(planned)
    ratio = time_ratio(plain, planned, PAIRS, lambda: None)
    return MeasuredPoint(point, figures.peak, figures.outside, figures.seconds, ratio - 1.0)


def _measure(subject: Subject) -> Measurement:
    return measure(subject.model, subject.args, subject.batch, loss_fn=subject.loss_fn, repeats=PAIRS)


def _copy(model: nn.Module) -> nn.Module:
    """A plain copy, also of a wrapped model; in training mode, unless only submodules are in eval mode."""
    try:
        copied = copy.deepcopy(model)
    except Exception as error:  # whatever a module's own __deepcopy__ raises
        raise ModelError(
            f"a {type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and plans "
            "are measured in copies. Wrap it with plan=frontier.plan(…) and call hybridremat.measure instead."
        ) from error
    return copied if copied.training else copied.train()

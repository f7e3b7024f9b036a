"""Run the plain step and some plans of a frontier in copies of the model, and measure them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hybridremat.curve_rows import spread
from hybridremat.demo_training import Subject, time_ratio
from hybridremat.errors import LimitError, ModelError
from hybridremat.measured_point import MeasuredPoint
from hybridremat.measurement import LossFunction, Measurement, loss_of, measure
from hybridremat.plan_records import FrontierPoint
from hybridremat.plans import Plan
from hybridremat.progress import planning_progress
from hybridremat.untouched import untouched

if TYPE_CHECKING:
    from hybridremat.curve import Frontier

PAIRS = 3  # steps of each, taken in turn: a machine that slows down slows both


def measured_points(
    curve: Frontier,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    count: int,
    loss_fn: LossFunction | None,
    show: bool,
) -> tuple[MeasuredPoint, ...]:
    """The plain step, then ``count`` points of the curve by rising peak.

    Errors are those of :meth:`hybridremat.Frontier.measured`.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise LimitError(f"count={count!r} is out of range: give a number ≥ 1 of points to be measured")
    points = spread(curve.points, count)
    with untouched(model), planning_progress(show=show) as report:
        report("measuring the plain step", 0, len(points) + 1)
        plain = Subject(_copied(model), kwargs, loss_fn or loss_of, args)
        figures = _measure(plain)
        found = [MeasuredPoint(None, figures.peak, figures.outside, figures.seconds, 0.0)]
        for number, point in enumerate(points, start=1):
            report("measuring plans", number, len(points) + 1)
            found.append(_measured(point, curve.plan(memory_limit=point.peak), plain, model))
    return tuple(found)


def _measured(point: FrontierPoint, plan: Plan, plain: Subject, model: nn.Module) -> MeasuredPoint:
    from hybridremat.api import wrap  # which makes frontiers

    wrapped = wrap(
        _copied(model), plain.args, plain.batch, plan=plan, progress=False, across_ranks=False, cache=False
    )
    planned = Subject(wrapped, plain.batch, plain.loss_fn, plain.args)
    figures = _measure(planned)
    ratio = time_ratio(plain, planned, PAIRS, lambda: None)
    return MeasuredPoint(point, figures.peak, figures.outside, figures.seconds, ratio - 1.0)


def _measure(subject: Subject) -> Measurement:
    return measure(subject.model, subject.args, subject.batch, loss_fn=subject.loss_fn, repeats=PAIRS)


def _copied(model: nn.Module) -> nn.Module:
    """A copy in training mode, unless submodules alone are in eval mode; a wrapped model's copy is plain."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # whatever a module's own __deepcopy__ raises
        raise ModelError(
            f"a {type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and measuring "
            "runs its plans in copies. Wrap it with plan=curve.plan(…), and call hybridremat.measure instead."
        ) from error
    return twin if twin.training else twin.train()

"""Bounds along a frontier: the overhead that no schedule goes below under each of some limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridremat.analysis.frontier_data import OverheadBound
from hybridremat.analysis.frontier_rows import SHOWN, evenly_spaced
from hybridremat.errors import LimitError
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.progress import Progress, planning_progress
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.certify import least_bound, require_backward, time_bound
from hybridremat.plans.certify_joined import joined_bounds
from hybridremat.sequence.bounds.certificate import MANY

if TYPE_CHECKING:
    from hybridremat.planning.breaks.frontier import AnyFrontier, PathFrontier


Certified = tuple[tuple[OverheadBound, ...], int]
"""Bounds by rising peak, and the least bytes of any schedule."""


def certify_points(frontier: AnyFrontier, *, show: bool) -> Certified:
    """Bounds at the peaks of the points that are shown, and the least bytes of any schedule.

    Raises
    ------
    LimitError
        If the step is compiled or has no backward.
    """
    with planning_progress(show=show) as report:
        if isinstance(frontier, StepFrontier):
            return _certify_graph(frontier, report)
        if isinstance(frontier, GraphFrontier) or frontier.compiler != "eager":
            raise LimitError(
                "the frontier of a compiled step cannot be certified: bounds are those of a graph"
            )
        return _certify_joined(frontier, report)


def _certify_graph(frontier: StepFrontier, report: Progress) -> Certified:
    require_backward(frontier.graph)
    shown = {point.peak for point in evenly_spaced(frontier.points(), SHOWN)}
    chosen = [each for each in frontier.candidates if each.peak in shown]
    bounds: list[OverheadBound] = []
    most = 0
    for point in reversed(chosen):  # a bound under a limit holds under every smaller one
        report("certifying", len(bounds), len(chosen) + 1)
        found = time_bound(frontier.judge, point.needs, point.schedule, MANY)
        most = max(most, found)
        bounds.append(_overhead(point.peak, most, frontier.plain.time))
    report("certifying", len(chosen), len(chosen) + 1)
    least = least_bound(frontier.judge, chosen[0].schedule)
    return tuple(reversed(bounds)), least


def _certify_joined(frontier: PathFrontier, report: Progress) -> Certified:
    """Bounds of several graphs: of one step, whatever waits beside it, of at most a point's peak."""
    peaks = [point.peak for point in frontier.points()]
    plan = frontier.plan_under(frontier.least_needs(None))
    joined = joined_bounds(plan, peaks[-1], forwards=1)
    bounds: list[OverheadBound] = []
    most = 0
    for peak in reversed(peaks):
        report("certifying", len(bounds), len(peaks) + 1)
        most = max(most, joined.time_under(peak))
        bounds.append(_overhead(peak, most, frontier.plain_time))
    report("certifying", len(peaks), len(peaks) + 1)
    return tuple(reversed(bounds)), joined_bounds(plan, plan.predicted_peak, forwards=1).least_peak()


def _overhead(peak: int, time: int, plain_time: int) -> OverheadBound:
    return OverheadBound(peak, time / plain_time - 1.0 if time else 0.0)

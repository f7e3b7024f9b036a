"""Bounds along a frontier: the overhead that no schedule goes below under each of some limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridremat.analysis.frontier_data import OverheadBound
from hybridremat.analysis.frontier_rows import SHOWN, evenly_spaced
from hybridremat.errors import LimitError
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.certify import require_backward
from hybridremat.sequence.bounds.certificate import MANY, bound_under, least_peak_bound

if TYPE_CHECKING:
    from hybridremat.planning.breaks.frontier import AnyFrontier


def certify_points(
    frontier: AnyFrontier, *, show: bool
) -> tuple[tuple[OverheadBound, ...], int]:
    """Bounds at the peaks of the points that are shown, by rising peak, and the least bytes of any schedule.

    Raises
    ------
    LimitError
        If the step is compiled, is several graphs, or has no backward.
    """
    if not isinstance(frontier, StepFrontier):
        kind = "compiled step" if isinstance(frontier, GraphFrontier) else "step of several graphs"
        raise LimitError(f"the frontier of a {kind} cannot be certified: bounds are those of one graph")
    require_backward(frontier.graph)
    shown = {point.peak for point in evenly_spaced(frontier.points(), SHOWN)}
    chosen = [each for each in frontier.candidates if each.peak in shown]
    bounds: list[OverheadBound] = []
    most = 0
    with planning_progress(show=show) as report:
        for point in reversed(chosen):  # a bound under a limit holds under every smaller one
            report("certifying", len(bounds), len(chosen) + 1)
            found = bound_under(frontier.judge, point.needs, point.schedule, MANY)
            most = max(most, found)
            bounds.append(OverheadBound(point.peak, most / frontier.plain.time - 1.0 if most else 0.0))
        report("certifying", len(chosen), len(chosen) + 1)
        least = least_peak_bound(frontier.graph, chosen[0].schedule)
    return tuple(reversed(bounds)), least

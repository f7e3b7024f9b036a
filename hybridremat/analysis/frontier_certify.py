"""Bounds along a frontier: the overhead that no schedule goes below under each of some limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridremat.analysis.frontier_data import OverheadBound
from hybridremat.analysis.frontier_rows import SHOWN, evenly_spaced
from hybridremat.errors import LimitError
from hybridremat.planning.lowered_frontier import LoweredFrontier
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.certify import bound_under, require_backward
from hybridremat.sequence.bounds.certificate import MANY, least_peak_bound

if TYPE_CHECKING:
    from hybridremat.planning.breaks.frontier import AnyFrontier


def certify_points(
    frontier: AnyFrontier, *, show: bool
) -> tuple[tuple[OverheadBound, ...], int]:
    """Bounds at the peaks of the points that are shown, by rising peak, and the least bytes of any schedule.

    Of a compiled step: at the lowered ones, about schedules that the graph counts at no more than these, and
    in bytes as it counts them.

    Raises
    ------
    LimitError
        If the step is several graphs, or has no backward.
    """
    if isinstance(frontier, LoweredFrontier):
        counted = frontier.counted
        chosen = [(each.memory.peak, each.candidate) for each in frontier.lowered_points()]
    elif isinstance(frontier, StepFrontier):
        shown = {point.peak for point in evenly_spaced(frontier.points(), SHOWN)}
        counted, chosen = frontier, [(each.peak, each) for each in frontier.candidates if each.peak in shown]
    else:
        raise LimitError("the frontier of several graphs cannot be certified: bounds are those of one graph")
    require_backward(counted.graph)
    bounds: list[OverheadBound] = []
    most = 0
    with planning_progress(show=show) as report:
        for peak, point in reversed(chosen):  # a bound under a limit holds under every smaller one
            report("certifying", len(bounds), len(chosen) + 1)
            found = bound_under(counted.judge, point.needs, point.schedule, MANY)
            most = found if counted is not frontier else max(most, found)  # the count need not fall with code
            bounds.append(OverheadBound(peak, most / counted.plain.time - 1.0 if most else 0.0))
        report("certifying", len(chosen), len(chosen) + 1)
        least = least_peak_bound(counted.graph, chosen[0][1].schedule)
    return tuple(reversed(bounds)), least

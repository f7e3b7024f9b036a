"""Certificates of steps of several graphs: what their sums are, and how each graph runs."""

from __future__ import annotations

from hybridremat.errors import LimitError
from hybridremat.graph.joint import Phase
from hybridremat.graph.memory import schedule_time
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import Certificate, StepSection
from hybridremat.sequence.bounds.joined import JoinedBounds, JoinedEffort, PartGraph
from hybridremat.sequence.joined_graphs import Beside, MultiGraphStep, PartPoint, StepPart


def joined_certificate(plan: PlanData, limit: int) -> Certificate:
    """The certificate of a plan of several graphs.

    Raises
    ------
    LimitError
        If the plan does not say how they are joined, or none has a backward.
    """
    bounds = joined_bounds(plan, limit - plan.reserve, forwards=plan.forwards)
    alone = joined_bounds(plan, plan.predicted_peak, forwards=1)
    return Certificate(
        limit=limit,
        time=bounds.step.time((0,) * len(bounds.step.parts)),
        lower_bound=bounds.time_under(limit - plan.reserve),
        least_bound=alone.least_peak(),
    )


def joined_bounds(
    plan: PlanData, most: int, *, forwards: int, effort: JoinedEffort | None = None
) -> JoinedBounds:
    """Bounds of the step of a plan, under limits of at most ``most`` bytes.

    Raises
    ------
    LimitError
        If the plan does not say how its graphs are joined, or none has a backward.
    """
    composition = plan.composition
    if composition is None:
        raise LimitError(
            "a plan file of several graphs that was written before it kept how they are joined cannot be "
            "certified: make the plan again"
        )
    graphs = {
        number: graph
        for number, section in enumerate(composition.sections)
        if section.part is not None and (graph := _graph_of(plan.parts[section.part])) is not None
    }
    if not graphs:
        raise LimitError("a forward alone cannot be certified: nothing in it is computed again")
    parts = tuple(_part_of(plan, section) for section in composition.sections)
    order = tuple(range(len(parts)))
    step = MultiGraphStep(
        parts,
        order,
        composition.joined_bytes,
        forwards,
        composition.largest_gradient,
        others=tuple(Beside(each.beside_forward, each.beside_backward) for each in composition.sections),
    )
    return JoinedBounds(step, graphs, most, effort or JoinedEffort())


def _part_of(plan: PlanData, section: StepSection) -> StepPart:
    part = None if section.part is None else plan.parts[section.part]
    time = 0 if part is None or part.details is None else schedule_time(part.details.graph, part.schedule)
    point = PartPoint(section.forward_peak, section.backward_peak, section.saved, time)
    most = section.dropped + section.retained  # other schedules may retain nothing
    return StepPart((point,), section.left, most)


def _graph_of(part: PlanData) -> PartGraph | None:
    """The graph of a part; None if it runs in one way."""
    if part.details is None or all(op.phase is not Phase.BACKWARD for op in part.details.graph.ops):
        return None
    return PartGraph(part.details.graph, part.schedule)

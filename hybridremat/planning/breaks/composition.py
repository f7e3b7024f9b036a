"""What the memory of a planned step of several graphs is added up from, kept with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridremat.planning.breaks.problem import PathProblem
from hybridremat.plans.records import StepComposition, StepSection
from hybridremat.sequence.joined_graphs import MultiGraphStep


def composed(
    step: MultiGraphStep, chosen: Sequence[int], problem: PathProblem
) -> StepComposition:
    """The sections of a step of a problem whose parts run as chosen: graphs, and then code between them."""
    sections: list[StepSection] = []
    graphs = 0
    for number, beside in zip(step.order, step.beside, strict=True):
        part, point = step.parts[number], step.parts[number].points[chosen[number]]
        is_graph = number < len(problem.keys)
        sections.append(
            StepSection(
                part=number if is_graph else None,
                unit=problem.units[graphs] if is_graph and problem.units else "",
                forward_peak=point.forward_peak,
                backward_peak=point.backward_peak,
                saved=point.saved,
                left=part.gradient_bytes,
                dropped=part.dropped - point.retained,
                retained=point.retained,
                passed=problem.passing[number] if is_graph else frozenset(),
                beside_forward=beside.forward,
                beside_backward=beside.backward,
                inputs=problem.fading[number] if is_graph else frozenset(),
            )
        )
        graphs += is_graph
    return StepComposition(tuple(sections), step.joined_bytes, step.largest_gradient)


def placed(composition: StepComposition | None, places: Sequence[int]) -> StepComposition | None:
    """The same with other numbers of the plans of its graphs, in the order of the forward."""
    if composition is None:
        return None
    numbers = iter(places)
    sections = tuple(
        each if each.part is None else replace(each, part=next(numbers)) for each in composition.sections
    )
    return replace(composition, sections=sections)

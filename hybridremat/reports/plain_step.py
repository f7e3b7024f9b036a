"""The plain step of a plan; of several graphs, composed as the plan is."""

from __future__ import annotations

from dataclasses import replace

from hybridremat.graph.joint import as_plain, plain_schedule
from hybridremat.graph.memory import inputs_in_backward
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import StepSection
from hybridremat.sequence.judge import Judge


def plain_plan(plan: PlanData) -> PlanData:
    """The plan with every graph as plain PyTorch runs it; those without details stay as they are."""
    if plan.composition is None:
        return _plain_part(plan)
    sections = tuple(
        each if each.part is None else _plain_section(each, plan.parts[each.part])
        for each in plan.composition.sections
    )
    composition = replace(plan.composition, sections=sections)
    return replace(plan, parts=tuple(map(_plain_part, plan.parts)), composition=composition)


def _plain_part(part: PlanData) -> PlanData:
    if part.details is None:
        return part
    graph = as_plain(part.details.graph)
    chain = replace(part.details.chain, graph=graph)
    return replace(part, details=replace(part.details, chain=chain), schedule=plain_schedule(graph))


def _plain_section(section: StepSection, part: PlanData) -> StepSection:
    """All gradients are there at the end of the step."""
    if part.details is None:
        return section
    graph = part.details.graph
    phases = Judge(as_plain(graph)).phases(plain_schedule(graph))
    inputs = inputs_in_backward(graph, plain_schedule(graph), section.inputs)
    early = sum(graph.values[value].bytes for value in graph.leaving)
    return replace(
        section,
        forward_peak=phases.forward,
        backward_peak=phases.backward + inputs,
        saved=phases.between + inputs,
        left=section.left + early,
    )

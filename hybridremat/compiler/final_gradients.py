"""Where in an emitted backward the gradients are final: nothing reads them or their inputs any more.

From there on they may be handed over, whatever the schedule was planned for; bytes do not change by it
(:mod:`hybridremat.compiler.sections`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from torch import fx

from hybridremat.graph.generated_code import PLACE
from hybridremat.graph.joint import Delivery, Phase, Schedule
from hybridremat.graph.memory import MemorySimulator
from hybridremat.graph.private_torch import input_gradients, overwritten_inputs, step_inputs
from hybridremat.graph.tracing.fx_nodes import joint_outputs
from hybridremat.graph.tracing.trace import TracedStep

FINAL: Final = "hybridremat_final"
"""A call's ``meta``: the results of the backward that are final once it has run, in order."""


def mark_final_gradients(step: TracedStep, schedule: Schedule, backward: fx.GraphModule) -> None:
    """Note in the calls of a backward that was emitted of ``schedule`` which gradients are final with them.

    None is where the forward changes or returns an input that has a gradient, or where inputs are made of
    others (a DTensor): the results are then gradients of these.
    """
    outputs, inputs = joint_outputs(step.module), step_inputs(step.module)
    places = input_gradients(step.module)
    if any(place != step.num_outputs + index for index, place in places.items()):
        return
    made = {i: node for i, place in places.items() if isinstance(node := outputs[place], fx.Node)}
    of_inputs = {v for index in made if index in inputs for v in step.node_values[inputs[index]]}
    returned = [node for node in outputs[: step.num_outputs] if isinstance(node, fx.Node)]
    if overwritten_inputs(step.module) or any(of_inputs.intersection(step.node_values[n]) for n in returned):
        return
    found = _gradients(step, made, inputs)
    leaving = {each.gradient for each in found}
    graph = replace(step.graph, gradients=step.graph.gradients - leaving, deliveries=found)
    departures = MemorySimulator(graph).departures(schedule)
    for node in backward.graph.nodes:
        if node.op == "call_function" and (final := departures.get(node.meta.get(PLACE, -1))):
            node.meta[FINAL] = tuple(each.index for each in final)


def _gradients(
    step: TracedStep, made: Mapping[int, fx.Node], inputs: Mapping[int, fx.Node]
) -> tuple[Delivery, ...]:
    """Those gradients among ``made`` that the backward makes and returns once, of whole inputs."""
    uses = Counter(value for node in made.values() for value in set(step.node_values[node]))
    found = []
    for index, node in made.items():
        values = step.node_values[node]
        if index not in inputs or len(values) != 1 or uses[values[0]] > 1:
            continue
        producer, (parameter, *_) = step.graph.producer(values[0]), step.node_values[inputs[index]]
        if values[0] in step.graph.gradients and producer is not None and producer.phase is Phase.BACKWARD:
            found.append(Delivery(values[0], parameter, index))
    return tuple(found)

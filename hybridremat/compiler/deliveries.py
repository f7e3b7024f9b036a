"""The part of the checker that reads calls which hand out a gradient in the backward.

Whoever takes a gradient may change its parameter and drop it, so nobody may read either afterwards, through
any view.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from hybridremat.compiler.buffer_hazards import check_error
from hybridremat.compiler.early_gradients import deliver
from hybridremat.graph.private_torch import step_inputs
from hybridremat.graph.tracing.trace import TracedStep


def is_delivery(node: fx.Node) -> bool:
    """Whether a node hands out a gradient: as emitted, or as an op of a compiled graph."""
    return node.target is deliver or str(node.target) == "hybridremat.deliver.default"


def delivered_gradients(module: fx.GraphModule) -> dict[int, fx.Node]:
    """The gradients that a graph hands out, by the input that each is for.

    Raises
    ------
    PlanError
        If an input gets two.
    """
    found: dict[int, fx.Node] = {}
    for node in filter(is_delivery, module.graph.nodes):
        gradient, index = node.args
        if index in found:
            raise check_error(f"{node.name} hands out a gradient of input {index} that was handed out before")
        found[index] = gradient
    return found


def refuse_unsafe_deliveries(
    step: TracedStep,
    module: fx.GraphModule,
    held: Mapping[fx.Node, Mapping[int, int]],
    terms: Mapping[fx.Node, int],
    joint_terms: Mapping[fx.Node, int],
) -> None:
    """Raise PlanError if a graph reads a gradient that it has handed out, or its parameter.

    Parameters
    ----------
    held
        For each node of the graph, the storages that it holds: value → number. Parameters have none.
    terms, joint_terms
        The checker's terms of the graph's nodes, and of the joint graph's.
    """
    sources = step_inputs(step.module)
    inputs = {value.id for value in step.graph.values if value.producer is None}
    of_term = {term: inputs.intersection(step.node_values[node]) for node, term in joint_terms.items()}
    gone_inputs: set[int] = set()
    gone_storages: set[int] = set()
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        for source in node.all_input_nodes:
            if gone_inputs & of_term.get(terms[source], set()):
                raise check_error(f"{node.name} reads {source.name} after its gradient was handed out")
            if gone_storages.intersection(held[source].values()):
                raise check_error(f"{node.name} reads {source.name}, a gradient that was handed out before")
        if is_delivery(node):
            gradient, index = node.args
            gone_inputs.update(step.node_values[sources[index]])
            gone_storages.update(held[gradient].values())

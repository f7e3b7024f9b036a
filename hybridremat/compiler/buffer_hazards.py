"""The part of the checker that refuses reads of a buffer after the step has overwritten it.

A normalization in training mode may read overwritten running statistics: only the updated statistics depend
on them, which then must not be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from hybridremat.errors import PlanError
from hybridremat.graph.private_torch import OpOverload, overwritten_inputs
from hybridremat.graph.rewrites import stands_for
from hybridremat.graph.rewrites.rewrite import Call
from hybridremat.graph.tracing.fx_nodes import ignored_statistics, is_mutation, updated_statistics
from hybridremat.graph.tracing.trace import TracedStep


def check_error(what: str) -> PlanError:
    """The error for a plan that breaks a rule of the checker."""
    return PlanError(f"the emitted plan was refused by the checker and has not been run: {what}")


def refuse_stale_reads(
    step: TracedStep,
    modules: Iterable[fx.GraphModule],
    joint_terms: Mapping[fx.Node, int],
    terms: Iterable[Mapping[fx.Node, int]],
) -> None:
    """Raise PlanError if a node of the emitted graphs reads a value after it has been overwritten.

    Parameters
    ----------
    modules, terms
        The graphs in execution order, with the checker's term of each node.
    joint_terms
        The terms of the joint graph's nodes.
    """
    sharing = _terms_by_value(step, joint_terms)
    stale: set[int] = set()
    for module, term in zip(modules, terms, strict=True):
        void: set[fx.Node] = set()  # statistics updated from overwritten ones
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            _refuse(node, term, stale, void)
            if any(term[source] in stale for source in ignored_statistics(node)):
                void.update(updated_statistics(node))
            for target in written_arguments(node):
                for terms_of_value in sharing.values():
                    if term[target] in terms_of_value:
                        stale |= terms_of_value


def refuse_late_reads(
    step: TracedStep,
    joint_terms: Mapping[fx.Node, int],
    backward: fx.GraphModule,
    terms: Mapping[fx.Node, int],
) -> None:
    """Raise PlanError if the backward takes an input that PyTorch overwrites when the forward returns."""
    gone = {joint_terms[node] for node in overwritten_inputs(step.module)}
    for node in backward.graph.find_nodes(op="placeholder"):
        if terms[node] in gone:
            raise check_error(
                f"the backward reads {node.name}, which is overwritten when the forward returns"
            )


def _refuse(node: fx.Node, term: Mapping[fx.Node, int], stale: set[int], void: set[fx.Node]) -> None:
    op = node.target if isinstance(node.target, OpOverload) else stands_for(Call.of(node)).target
    allowed = {*ignored_statistics(node, op), *written_arguments(node)}
    for source in node.all_input_nodes:
        if source not in allowed and (source in void or term[source] in stale):
            raise check_error(f"{node.name} reads {source.name}, which the forward has overwritten")


def written_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that a node writes into."""
    if not is_mutation(node):
        return ()
    assert isinstance(node.target, OpOverload)
    pairs = zip(node.target._schema.arguments, node.args, strict=False)
    return tuple(
        given
        for entry, given in pairs
        if entry.alias_info is not None and entry.alias_info.is_write and isinstance(given, fx.Node)
    )


def _terms_by_value(step: TracedStep, joint_terms: Mapping[fx.Node, int]) -> dict[int, set[int]]:
    """For each value that is overwritten, the terms of the buffer and of its views before the update."""
    written = {v for n in step.op_nodes for target in written_arguments(n) for v in step.node_values[target]}
    found: dict[int, set[int]] = {value: set() for value in written}
    for node, term in joint_terms.items():
        if not is_mutation(node):
            for value in written.intersection(step.node_values.get(node, ())):
                found[value].add(term)
    return found

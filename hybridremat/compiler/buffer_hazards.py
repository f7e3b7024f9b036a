"""The part of the independent check that looks for reads of a buffer after the step has overwritten it.

The running statistics of a normalization in training mode are excepted, since no result depends on them
but the updated statistics; and these must not be read by anything then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from hybridremat.errors import PlanError
from hybridremat.graph.private_torch import OpOverload, overwritten_inputs
from hybridremat.graph.tracing.fx_nodes import ignored_statistics, is_mutation, updated_statistics
from hybridremat.graph.tracing.trace import TracedStep


def refused(what: str) -> PlanError:
    """The error that says why a plan is not run."""
    return PlanError(f"the emitted plan was refused by the checker and has not been run: {what}")


def refuse_stale_reads(
    step: TracedStep,
    modules: Iterable[fx.GraphModule],
    joint_terms: Mapping[fx.Node, int],
    terms: Iterable[Mapping[fx.Node, int]],
) -> None:
    """Walk the emitted graphs in execution order.

    Parameters
    ----------
    modules, terms
        The graphs one after the other, with the checker's term of each node.
    joint_terms
        The terms of the joint graph's nodes.

    Raises
    ------
    PlanError
        Naming the node that reads what is no longer there.
    """
    sharing = _terms_by_value(step, joint_terms)
    stale: set[int] = set()
    for module, term in zip(modules, terms, strict=True):
        void: set[fx.Node] = set()  # updated statistics made from overwritten ones
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
    """Refuse a backward that takes an input which PyTorch overwrites once the forward has returned.

    Raises
    ------
    PlanError
        Naming the input.
    """
    gone = {joint_terms[node] for node in overwritten_inputs(step.module)}
    for node in backward.graph.find_nodes(op="placeholder"):
        if terms[node] in gone:
            raise refused(f"the backward reads {node.name}, which is overwritten when the forward returns")


def _refuse(node: fx.Node, term: Mapping[fx.Node, int], stale: set[int], void: set[fx.Node]) -> None:
    allowed = {*ignored_statistics(node), *written_arguments(node)}
    for source in node.all_input_nodes:
        if source not in allowed and (source in void or term[source] in stale):
            raise refused(f"{node.name} reads {source.name}, which the forward has overwritten")


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
    """For each value that is overwritten, the terms of the buffer and of its views before that."""
    written = {v for n in step.op_nodes for target in written_arguments(n) for v in step.node_values[target]}
    found: dict[int, set[int]] = {value: set() for value in written}
    for node, term in joint_terms.items():
        if not is_mutation(node):
            for value in written.intersection(step.node_values.get(node, ())):
                found[value].add(term)
    return found

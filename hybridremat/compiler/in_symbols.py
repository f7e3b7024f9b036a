"""A step with its sizes written as symbols, as the checker reads it: what it proves then holds at every size.

Where a graph at some sizes has numbers, these have expressions. Two calls are the same only if they are at
every size, as two sizes that coincide at some are two expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from hybridremat.compiler.check import proven
from hybridremat.compiler.lifetimes import StepLifetimes
from hybridremat.compiler.lift import lifted_joint
from hybridremat.compiler.lifted import Lifted, with_numbers
from hybridremat.graph.tracing.alias_analysis import TraceError
from hybridremat.graph.tracing.symbolic import JOINT, ORIGIN, Instance, SymbolicJoint
from hybridremat.graph.tracing.symbolic_calls import symbol_of
from hybridremat.graph.tracing.trace import Originals, TracedStep


@dataclass(frozen=True)
class SymbolicStep:
    """A traced step whose calls have symbols.

    Attributes
    ----------
    step
        The step; the bytes, costs and times of its graph are those of the sizes at which it was traced. Its
        nodes have the fake tensors of the capture, with symbols, but those that tracing has made.
    own
        Nodes that tracing has made: their fake tensors are those of these sizes.
    """

    step: TracedStep
    own: frozenset[fx.Node]

    def proof(self, lifted: Lifted) -> StepLifetimes:
        """Check the lifted graphs of a schedule for all sizes, but for bytes.

        Raises
        ------
        PlanError
            As :func:`~hybridremat.compiler.check.proven`.
        """
        joint = {node.meta[JOINT]: node for node in self.step.module.graph.nodes if JOINT in node.meta}
        return proven(self.step, *lifted.with_numbers(symbol_of, joint))


def in_symbols(symbolic: SymbolicJoint, instance: Instance, step: TracedStep) -> SymbolicStep:
    """A traced copy of a symbolic joint graph, with symbols.

    Raises
    ------
    TraceError
        If a number of it is not known at other sizes.
    """
    if step.originals.whole is not None:
        raise TraceError("its losses are made by chunks")
    instance.mark_origins()
    module = _in_symbols(symbolic, instance, step.module)
    copies = {node.meta[JOINT]: node for node in module.graph.nodes if JOINT in node.meta}
    exact = step.originals.exact
    if exact is not None:
        known = {node.name: origin for node, origin in instance.origins.items()}
        for node in exact.graph.nodes:
            node.meta[JOINT] = node.name
            node.meta.pop(ORIGIN, None)
            if node.name in known:
                node.meta[ORIGIN] = known[node.name]
        exact = _in_symbols(symbolic, instance, exact)
    values: Mapping[fx.Node, tuple[int, ...]] = {
        copies[node.name]: held for node, held in step.node_values.items() if node.name in copies
    }
    made = replace(
        step,
        module=module,
        op_nodes=tuple(copies[node.name] for node in step.op_nodes),
        node_values=values,
        originals=Originals(exact=exact),
    )
    own = {copies[node.name] for node in step.module.graph.nodes if node not in instance.origins}
    return SymbolicStep(made, frozenset(own))


def _in_symbols(symbolic: SymbolicJoint, instance: Instance, module: fx.GraphModule) -> fx.GraphModule:
    lifted, fixed = lifted_joint(symbolic, instance.sizes, module)
    if fixed:
        raise TraceError(f"the numbers of {', '.join(fixed)} are not known at other sizes")
    return with_numbers(lifted, symbol_of, {})

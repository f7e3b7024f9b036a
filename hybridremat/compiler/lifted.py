"""The two graphs of a schedule with symbols for sizes; their copies are compiled, or checked at numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from hybridremat.compiler.offload.calls import hold_alike
from hybridremat.graph.private_torch import run_and_save_rng_state, unwritten_module
from hybridremat.graph.tracing.symbolic import JOINT, Instance
from hybridremat.graph.tracing.symbolic_calls import is_number, number_of


@dataclass(frozen=True)
class Lifted:
    """Two graphs with symbols.

    Attributes
    ----------
    forward, backward
        As AOTAutograd takes them: all size inputs are saved, in the order of ``SymbolicJoint.inputs``, and
        before them all buffers that the step changes.
    fixed
        The calls whose numbers are those of the sizes at which they were emitted: rewrites have made them.
        Where the same rewrites give other numbers, the graphs are not those of the step (:meth:`at`).
    num_sizes
        How many inputs are sizes.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    fixed: tuple[str, ...]
    num_sizes: int

    def at(self, instance: Instance) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The graphs with numbers, to be checked against the step of a copy of the joint graph.

        As emitted at these sizes: no size is saved.
        """
        joint = {node.name: node for node in instance.module.graph.nodes}
        return self.with_numbers(lambda node: number_of(node, instance.sizes), joint)

    def with_numbers(
        self, number: Callable[[fx.Node], Any], joint: Mapping[str, fx.Node]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The graphs as emitted with what ``number`` gives for each size: no size is saved.

        ``joint``: see :func:`with_numbers`.
        """
        both = self.forward, self.backward
        forward, backward = (with_numbers(each, number, joint) for each in both)
        (output,) = forward.graph.find_nodes(op="output")
        output.args = (output.args[0][: len(output.args[0]) - self.num_sizes],)
        for node in backward.graph.find_nodes(op="placeholder")[: self.num_sizes]:
            backward.graph.erase_node(node)
        return forward, backward


def twin(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, to be compiled: that rewrites its calls."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    copy = unwritten_module(module, graph)
    hold_alike(module, copy)
    return copy


def with_numbers(
    module: fx.GraphModule, number: Callable[[fx.Node], Any], joint: Mapping[str, fx.Node]
) -> fx.GraphModule:
    """A copy of a lifted graph with what ``number`` gives for each node that is one.

    ``joint``: by name the nodes of the joint graph that is made so, too; they have the fake tensors.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def given(node: fx.Node) -> Any:
        return number(node) if is_number(node) else copies[node]

    for node in module.graph.nodes:
        if is_number(node) and node.op != "placeholder":
            continue
        args, kwargs = fx.map_arg(node.args, given), fx.map_arg(node.kwargs, given)
        copies[node] = copy = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        copy.meta = dict(node.meta)
        if (known := joint.get(node.meta.get(JOINT, ""))) is not None and "val" in known.meta:
            drawn = node.target is run_and_save_rng_state
            own = known.meta["val"]
            copy.meta["val"] = (node.meta["val"][0], own) if drawn else own
    return unwritten_module(module, graph)

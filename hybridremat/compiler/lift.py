"""From the two graphs that run a schedule at one size to two that run it at every size.

They are emitted, and checked, at the sizes at which the schedule was found. Then each number that is a size
in the symbolic joint graph becomes that size again, computed from the inputs that are sizes; the backward
gets these as AOTAutograd passes them, behind the forward's other outputs and before its own other inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Final

import torch
from torch import fx

from hybridremat.compiler.deliveries import is_delivery
from hybridremat.compiler.emit import UNWATCHED
from hybridremat.compiler.lifted import Lifted
from hybridremat.compiler.offload.calls import MOVING
from hybridremat.compiler.rng_replay import replay
from hybridremat.graph.private_torch import (
    run_and_save_rng_state,
    tree_leaves,
    unguarded,
    unwritten_module,
)
from hybridremat.graph.sizes import Size, Sizes, Term, evaluated
from hybridremat.graph.tracing.fx_nodes import NUMBERS, Numbers, fake_call
from hybridremat.graph.tracing.size_expressions import size_of
from hybridremat.graph.tracing.symbolic import ORIGIN, SymbolicJoint
from hybridremat.graph.tracing.symbolic_calls import is_number, is_size, number_of


def lifted(
    symbolic: SymbolicJoint, sizes: Sizes, forward: fx.GraphModule, backward: fx.GraphModule
) -> Lifted:
    """The two graphs, emitted from a marked copy of a symbolic joint graph at some sizes, with symbols."""
    first, second = _Lift(symbolic, sizes, forward), _Lift(symbolic, sizes, backward)
    for node in forward.graph.nodes:
        first.write(node)
    (output,) = first.graph.find_nodes(op="output")
    buffers = [node for node in first.graph.find_nodes(op="placeholder") if node.meta.get(UNWATCHED)]
    returned = output.args[0]
    watched = [*returned[: symbolic.num_outputs], *_watched(returned[symbolic.num_outputs :])]
    numbers = [first.sizes_of[name] for name in symbolic.inputs]
    output.args = ((*watched, *buffers, *numbers),)
    output.meta.pop("desc", None)  # of outputs one by one: nothing of ours reads it
    second.take_inputs(len(returned) - symbolic.num_outputs, buffers)
    for node in backward.graph.nodes:
        if node.op != "placeholder":
            second.write(node)
    return Lifted(first.module(), second.module(), tuple(first.fixed + second.fixed), len(symbolic.inputs))


def lifted_joint(
    symbolic: SymbolicJoint, sizes: Sizes, module: fx.GraphModule
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """A marked copy of a symbolic joint graph at some sizes, as it has been rewritten, with symbols.

    What tracing has made gets fake tensors with symbols; of sizes of the sample, if it asks for more than it
    says. Second come the calls whose numbers are those of these sizes, as in :class:`Lifted`.
    """
    made = _Lift(symbolic, sizes, module)
    with unguarded(symbolic.module):
        for node in module.graph.nodes:
            made.write(node)
            copy = made.copies[node]
            if ORIGIN not in node.meta and node.op == "call_function" and copy.all_input_nodes:
                copy.meta["val"] = fake_call(node.target, copy.args, copy.kwargs, copy.all_input_nodes[0])
    return made.module(), tuple(made.fixed)


def _watched(saved: Sequence[Any]) -> list[Any]:
    return [node for node in saved if not (isinstance(node, fx.Node) and node.meta.get(UNWATCHED))]


class _Lift:
    """Writes one graph anew with symbols; ``sizes_of``: the node that is a size."""

    def __init__(self, symbolic: SymbolicJoint, sizes: Sizes, module: fx.GraphModule) -> None:
        self.symbolic, self.sizes, self.source = symbolic, sizes, module
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.sizes_of: dict[Size, fx.Node] = {}
        self.fixed: list[str] = []

    def module(self) -> fx.GraphModule:
        self.graph.lint()
        return unwritten_module(self.source, self.graph)

    def take_inputs(self, saved: int, buffers: Sequence[fx.Node]) -> None:
        """Write the inputs of the backward: sizes, what is saved, all buffers not to be watched, tangents.

        ``saved`` inputs of the source are saved, some of the buffers among them.
        """
        for name, node in self.symbolic.inputs.items():
            self.sizes_of[name] = self._input(node)
        taken = list(self.source.graph.find_nodes(op="placeholder"))
        given = {node.name: node for node in taken[:saved]}
        for node in _watched(taken[:saved]):
            self.write(node)
        for buffer in buffers:
            if buffer.name in given:
                self.write(given[buffer.name])
            else:
                self._input(buffer)
        for node in taken[saved:]:
            self.write(node)

    def _input(self, like: fx.Node) -> fx.Node:
        taken = self.graph.placeholder(like.name)
        taken.meta = dict(like.meta)
        return taken

    def write(self, node: fx.Node) -> None:
        """Write a node of the source."""
        origin = node.meta.get(ORIGIN)
        args, kwargs = node.args, dict(node.kwargs)
        numbered = node.target is operator.getitem or node.target in MOVING or is_delivery(node)
        if node.op == "call_function" and not numbered:
            args, kwargs = self._with_symbols(node, origin)
        copy = self.graph.create_node(
            node.op, node.target, self._copied(args), self._copied(kwargs), node.name, node.type
        )
        copy.meta = {key: item for key, item in node.meta.items() if key != ORIGIN}
        if origin is not None and "val" in origin.meta and node.target is not run_and_save_rng_state:
            copy.meta["val"] = origin.meta["val"]
        self.copies[node] = copy
        if node.op == "placeholder" and is_size(copy):
            self.sizes_of.setdefault(size_of(copy.meta["val"]), copy)

    def _copied(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda node: self.copies.get(node, node))

    def _with_symbols(self, node: fx.Node, origin: fx.Node | None) -> tuple[Any, Any]:
        """The arguments of a call: nodes of the source, and new nodes where the joint graph has sizes."""
        kwargs = dict(node.kwargs)
        if origin is None:
            return self._new_call(node)
        before = {run_and_save_rng_state: 1, replay: 2}.get(node.target, 0)
        try:
            args = (*node.args[:before], *self._paired(node.args[before:], origin.args))
            kwargs |= {name: self._paired(kwargs[name], given) for name, given in origin.kwargs.items()}
        except _OtherCallError:  # a rewrite has changed it
            return self._new_call(node)
        return args, kwargs

    def _new_call(self, node: fx.Node) -> tuple[Any, Any]:
        """The arguments of a call that is none of the captured graph."""
        made: Numbers | None = node.meta.get(NUMBERS)
        shape_of = made.shape_of if made is not None else None
        if made is None or (shape_of is not None and shape_of.graph is not self.symbolic.module.graph):
            if _has_numbers((node.args, node.kwargs)):
                self.fixed.append(node.name)
            return node.args, node.kwargs
        if shape_of is None:
            return node.args, node.kwargs
        shape = [size_of(each) for each in shape_of.meta["val"].shape]
        numbers = [evaluated(each, self.sizes) for each in shape]
        args = [list(map(self._node_of, shape)) if each == numbers else each for each in node.args]
        return tuple(args), node.kwargs

    def _paired(self, own: Any, given: Any) -> Any:
        """What a call is given, numbers that are sizes as nodes; ``given``: the same in the joint graph."""
        if isinstance(given, (list, tuple)):
            if not isinstance(own, (list, tuple)) or len(own) != len(given):
                raise _OtherCallError
            return type(given)(map(self._paired, own, given))
        if not is_number(given):
            if isinstance(own, int) and not isinstance(own, bool) and own != given:
                raise _OtherCallError
            return own
        if number_of(given, self.sizes) != own:
            raise _OtherCallError
        return self._number(given)

    def _number(self, node: fx.Node) -> Any:
        """The node that computes what one of the symbolic joint graph does."""
        if is_size(node):
            return self._node_of(size_of(node.meta["val"]))
        if node not in self.copies:  # a fraction
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._number)
            computed: Any = node.target
            copy = self.graph.call_function(computed, args, kwargs)
            copy.meta["val"] = node.meta["val"]
            self.copies[node] = copy
        return self.copies[node]

    def _node_of(self, size: Size) -> Any:
        """The node that computes a size; a number for one that has no symbols."""
        if not isinstance(size, Term) and not isinstance(size, str):
            return size
        if size not in self.sizes_of:
            assert isinstance(size, Term), f"{size} is no input"
            given = [self._node_of(each) for each in size.args]
            self.sizes_of[size] = reduce(partial(self._computed, size.op), given)
        return self.sizes_of[size]

    def _computed(self, op: str, one: Any, other: Any) -> fx.Node:
        made = self.graph.call_function(_COMPUTED[op], (one, other))
        numbers = [each.meta["val"] if isinstance(each, fx.Node) else each for each in (one, other)]
        made.meta["val"] = _COMPUTED[op](*numbers)
        return made


class _OtherCallError(Exception):
    """A call has other constants than the one of the joint graph that it comes from."""


_COMPUTED: Final[dict[str, Callable[..., Any]]] = {
    "+": operator.add, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "max": torch.sym_max, "min": torch.sym_min,
}  # fmt: skip


def _has_numbers(arguments: Any) -> bool:
    """Whether a call is given whole numbers."""
    return any(isinstance(each, int) and not isinstance(each, bool) for each in tree_leaves(arguments))

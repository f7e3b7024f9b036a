"""The autograd graph of an opaque call, without its tensors: made once, run backward with those of any call.

A call runs under autograd, and PyTorch's hooks for saved tensors put a number in the place of each. The
graph that is left after the first call, on made-up numbers, is the template: kernels, their order and what is
added up are PyTorch's own. A backward runs it with the tensors of its own call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hybridremat.errors import CaptureError, PlanError
from hybridremat.graph.opaque.region import Region
from hybridremat.graph.private_torch import (
    as_in_eager,
    get_gradient_edge,
    node_number,
    tree_flatten,
    tree_unflatten,
)


class Saved:
    """What the hooks for saved tensors put away, by number."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> int:
        """Put a tensor away."""
        self.tensors.append(tensor.detach())
        return len(self.tensors) - 1

    def unpack(self, number: int) -> Tensor:
        """Give it back."""
        return self.tensors[number]


@dataclass(frozen=True)
class Context:
    """What a ``torch.autograd.Function`` keeps on its ``ctx`` beside the tensors that it saves.

    ``constants`` are leaves of it, with None in the ``places`` where ``tensors`` follow one another.
    """

    node: Any
    constants: tuple[Any, ...]
    places: tuple[int, ...]
    structure: Any
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(node: Any) -> Context:
        """That of a node."""
        leaves, structure = tree_flatten(dict(node.__dict__))
        places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return Context(node, constants, places, structure, tuple(leaves[place].detach() for place in places))

    def fill(self, tensors: Iterable[Tensor | None]) -> None:
        """Put tensors in the places of its own."""
        leaves = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        self.node.__dict__.update(tree_unflatten(leaves, self.structure))


@dataclass
class Run:
    """One run of a call under autograd: its results, and what its graph keeps."""

    inputs: list[Tensor]
    results: list[Any]
    structure: Any
    saved: Saved
    contexts: list[Context] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        """Nodes of its autograd graph."""
        return sum(1 for _ in _nodes(self.results))

    @property
    def tensors(self) -> list[Tensor | None]:
        """Results (None for those that are no tensors), then what the graph keeps; without autograd."""
        results = [leaf.detach() if isinstance(leaf, Tensor) else None for leaf in self.results]
        attributes = [tensor for each in self.contexts for tensor in each.tensors]
        return [*results, *self.saved.tensors, *attributes]


def run(region: Region, given: Sequence[Tensor], *, contexts: bool = True) -> Run:
    """Run a call on real tensors; ``contexts``: whether there may be a ``torch.autograd.Function``."""
    saved = Saved()
    with torch.enable_grad(), as_in_eager():
        inputs = [each.prepared(tensor) for each, tensor in zip(region.inputs, given, strict=True)]
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        returned = region.run(inputs)
    results, structure = tree_flatten(returned)
    found = list(_nodes(results)) if contexts else []
    functions = [node for node in found if isinstance(node, torch.autograd.function.BackwardCFunction)]
    ordered = sorted(functions, key=node_number)
    return Run(inputs, results, structure, saved, [Context.of(node) for node in ordered])


class Template:
    """The autograd graph of a run, emptied of its tensors."""

    def __init__(self, run: Run) -> None:
        _require_inputs_alone(run)
        self._saved, self._contexts = run.saved, [replace(each, tensors=()) for each in run.contexts]
        self._lock = threading.RLock()
        self.outputs = [
            get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
            for leaf in run.results
        ]
        self.inputs = [get_gradient_edge(each) if each.requires_grad else None for each in run.inputs]
        self._empty()

    def backward(self, grads: Sequence[Tensor | None], kept: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs, None for those that have none.

        Parameters
        ----------
        grads
            Those of the results, None where there is none.
        kept
            The tensors that the graph keeps, as in :attr:`Run.tensors`.
        """
        pairs = [(e, g) for e, g in zip(self.outputs, grads, strict=True) if e is not None and g is not None]
        wanted = [edge for edge in self.inputs if edge is not None]
        count = len(kept) - sum(len(each.places) for each in self._contexts)
        with self._lock, as_in_eager():
            self._saved.tensors = list(kept[:count])
            attributes = iter(kept[count:])
            for each in self._contexts:
                each.fill(islice(attributes, len(each.places)))
            try:
                found = torch.autograd.grad(
                    [edge for edge, _ in pairs],
                    wanted,
                    [grad for _, grad in pairs],
                    retain_graph=True,
                    allow_unused=True,
                )
            finally:
                self._empty()
        gradients = iter(found)
        return [None if edge is None else next(gradients) for edge in self.inputs]

    def _empty(self) -> None:
        self._saved.tensors = []
        for each in self._contexts:
            each.fill([None] * len(each.places))

    def require_same(self, run: Run) -> None:
        """Refuse a run that keeps other numbers on a ``ctx``: the template would use those of its own.

        Raises
        ------
        PlanError
        """
        if [each.constants for each in run.contexts] != [each.constants for each in self._contexts]:
            raise PlanError(
                "an autograd.Function that is one opaque op keeps numbers on its ctx that depend on the "
                "data. Keep them as tensors, or leave it out of the opaque calls."
            )


def _nodes(results: Sequence[Any]) -> Iterator[Any]:
    """The nodes of the autograd graph behind some results."""
    stack = [r.grad_fn for r in results if isinstance(r, Tensor) and r.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                stack.append(source)


def _require_inputs_alone(run: Run) -> None:
    """Refuse a call that reads tensors which require a gradient and are no arguments of it."""
    own = {id(each if each.is_leaf else each._base) for each in run.inputs}
    foreign = [n for n in _nodes(run.results) if hasattr(n, "variable") and id(n.variable) not in own]
    if foreign:
        raise CaptureError(
            "an opaque call reads a tensor that requires a gradient and is not among its arguments "
            f"(of shape {tuple(foreign[0].variable.shape)}), which would get none: pass it as an argument."
        )

"""Which inputs of graphs are gone after the forward unless their graph keeps them, as found in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import Node

from hybridremat.compiler.backend import CapturedGraph
from hybridremat.graph.private_torch import storage_reference


@dataclass(frozen=True)
class Fading:
    """Places of a graph's inputs: those that it alone is given and that go, in every run, and in some run."""

    always: frozenset[int]
    ever: frozenset[int]

    def or_as(self, other: Fading | None) -> Fading:
        """In these runs, and in others."""
        return self if other is None else Fading(self.always & other.always, self.ever | other.ever)


@dataclass
class FadingInputs:
    """Inputs that code between graphs makes, and drops while the forward runs.

    Attributes
    ----------
    runs
        The graphs that ran, each with its inputs by place: the storage, and what tells whether it is there.
    nodes
        Of the autograd graphs of inputs, which hold what these have saved, as the graphs would in training.
    uses
        How many inputs of graphs each storage is.
    outputs
        The storages that graphs have made.
    """

    runs: list[tuple[CapturedGraph, dict[int, tuple[int, Callable[[], bool]]]]] = field(default_factory=list)
    nodes: list[Node | None] = field(default_factory=list)
    uses: Counter[int] = field(default_factory=Counter)
    outputs: set[int] = field(default_factory=set)

    def enter(self, graph: CapturedGraph, args: Sequence[object]) -> None:
        """A graph is given these."""
        made = {n: each for n, each in enumerate(args) if isinstance(each, torch.Tensor) and _may_fade(each)}
        self.runs.append((graph, {n: (_storage(each), storage_reference(each)) for n, each in made.items()}))
        self.nodes += [each.grad_fn for each in args if isinstance(each, torch.Tensor)]
        self.uses.update(_storages(args))

    def leave(self, outputs: Iterable[object]) -> None:
        """A graph has made these."""
        self.outputs.update(_storages(outputs))

    def found(self) -> dict[CapturedGraph, Fading]:
        """What is gone."""
        places: dict[CapturedGraph, Fading] = {}
        for graph, inputs in self.runs:
            made = {n: storage for n, (storage, _) in inputs.items() if storage not in self.outputs}
            gone = frozenset(n for n in made if not inputs[n][1]())
            alone = frozenset(n for n in gone if self.uses[made[n]] == 1)
            places[graph] = Fading(alone, gone).or_as(places.get(graph))
        return places


def _may_fade(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made in this step, and has all of the memory that it keeps."""
    if tensor.grad_fn is None or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _storages(values: Iterable[object]) -> Iterable[int]:
    tensors = (each for each in values if isinstance(each, torch.Tensor))
    return (_storage(each) for each in tensors if each.layout is torch.strided)


def _storage(tensor: torch.Tensor) -> int:
    """Its number, which is not given again while there are references to it, weak ones too."""
    return int(tensor.untyped_storage()._cdata)

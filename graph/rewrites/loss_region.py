"""A part of a joint graph that goes row by row: from the input of a last product to a loss, and back.

A tensor of the region has leading dimensions that count rows, ``(batch, length, …)`` or ``(rows, …)``; in the
*body*, which is written for a chunk of rows, it has one. A slice of leading dimensions (labels are shifted)
chooses rows: in the body all tensors have the chosen ones alone, and its backward puts zeros into the places
of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

from torch import fx

from hybridremat.graph.tracing.fx_nodes import source_line


class NotByChunksError(Exception):
    """Why a product's loss cannot be made by chunks of rows."""


def named(node: Any) -> str:
    """A node with its op, and the line that it comes from."""
    line = source_line(node) if isinstance(node, fx.Node) else ""
    return f"{node} ({node.target}{', ' + line if line else ''})" if isinstance(node, fx.Node) else str(node)


@dataclass(frozen=True)
class Choice:
    """Rows ``start`` to ``end`` along dimension ``dim`` of those that count rows, of these ``sizes``."""

    sizes: tuple[int, ...]
    dim: int
    start: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dimensions of what is chosen."""
        return *self.sizes[: self.dim], self.end - self.start, *self.sizes[self.dim + 1 :]


@dataclass(frozen=True)
class RowLayout:
    """How a tensor counts rows.

    Attributes
    ----------
    dims
        How many leading dimensions count them.
    state
        ``"all"`` rows, the ``"chosen"`` ones, or all with zeros beside the chosen ones (``"padded"``).
    turned
        A matrix with rows as its second dimension.
    """

    dims: int = 1
    state: str = "all"
    turned: bool = False


@dataclass(frozen=True)
class Given:
    """A tensor that the region is given: with rows, or (None) whole."""

    node: fx.Node
    layout: RowLayout | None


@dataclass(frozen=True)
class Result:
    """What the region gives: ``node`` of the joint graph, made from what the body returns at ``outputs``.

    ``shape``: of a sum over rows, without dimensions of length one for what is summed. ``scale``: what a mean
    divides the sum by, a number or the loss whose weights tell.
    """

    node: fx.Node
    kind: str
    outputs: tuple[fx.Node, ...]
    layout: RowLayout
    shape: tuple[int, ...] = ()
    scale: fx.Node | int | None = None


@dataclass
class Region:
    """A region, as far as it has been followed.

    Attributes
    ----------
    product
        The product of ``length`` rows with a matrix of weights.
    body
        What makes a chunk; ``made`` maps nodes of the joint graph to its nodes, ``layouts`` to how they count
        rows, ``given`` what it is given to its inputs.
    results, products
        What the region gives, and its products.
    losses, counts
        Losses over classes with their calls in the body, and the nodes of their total weights.
    choice
        The rows that a slice chooses, if any does.
    sums_all
        Something that sums over all rows.
    """

    product: fx.Node
    length: int
    body: fx.Graph = field(default_factory=fx.Graph)
    layouts: dict[fx.Node, RowLayout] = field(default_factory=dict)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    given: dict[Given, fx.Node] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    products: list[fx.Node] = field(default_factory=list)
    losses: dict[fx.Node, fx.Node] = field(default_factory=dict)
    counts: dict[fx.Node, fx.Node] = field(default_factory=dict)
    choice: Choice | None = None
    sums_all: fx.Node | None = None

    def input(self, source: Any, layout: RowLayout | None = None) -> fx.Node:
        """The body's input for a tensor that it is given, with rows or whole."""
        given = Given(source, layout)
        if given not in self.given:
            with self.body.inserting_before(next(iter(self.body.nodes), None)):
                self.given[given] = self.body.placeholder(f"given_{len(self.given)}")
        return self.given[given]

    def write(
        self,
        node: fx.Node,
        args: Sequence[Any],
        layout: RowLayout,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write a node's call in the body."""
        target: Any = node.target
        self.put(node, self.body.call_function(target, tuple(args), dict(kwargs)), layout)

    def put(self, node: fx.Node, made: fx.Node, layout: RowLayout) -> None:
        """Let a node of the body stand for one of the joint graph."""
        self.made[node], self.layouts[node] = made, layout

    def layout_of(self, node: Any) -> RowLayout:
        """How a node of the region counts rows, by its leading dimensions."""
        layout = self.layouts.get(node)
        if layout is None or layout.turned:
            raise NotByChunksError(f"{named(node)} is read in another order")
        return layout

    def count(self, layout: RowLayout) -> int:
        """The rows of a tensor."""
        return prod(self.choice.shape) if layout.state == "chosen" and self.choice else self.length

    def sums(self, node: fx.Node, layout: RowLayout) -> None:
        """Note that a node sums over rows."""
        if layout.state == "all":
            self.sums_all = node

"""The part of the checker that reads moves to host memory and back.

It knows nothing of the schedule: a value is sent once and freed once, in the forward, where nobody reads or
writes over it afterwards; what is ready in the backward is what was freed. Each takes bytes of its own there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from hybridremat.compiler.buffer_hazards import check_error
from hybridremat.compiler.offload.calls import begin, fetch, freed, ready, send
from hybridremat.compiler.overwrites import written_over

Held = Mapping[fx.Node, Mapping[int, int]]
"""For each node of a graph, the storages that it holds: value → number."""


@dataclass
class Away:
    """What has left in a forward, by move: the checker's terms of what was sent, and of what was freed."""

    sent: dict[int, int] = field(default_factory=dict)
    freed: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def read(self, node: fx.Node, terms: Mapping[fx.Node, int]) -> tuple[object, ...] | int:
        """The key of a node's term, or its term.

        Raises
        ------
        PlanError
            If a value does not come back as it left, or leaves twice.
        """
        args: tuple[Any, ...] = node.args
        if node.target is begin:
            return ("begin", args[0])
        move = args[1]
        if node.target is send:
            if move in self.sent:
                raise check_error(f"{node.name} sends to a place that is taken")
            self.sent[move] = terms[args[2]]
            return ("sent", move)
        if node.target is freed:
            if move in self.freed or move not in self.sent or args[0].args[1] != move:
                raise check_error(f"{node.name} frees what has not been sent, or twice")
            self.freed[move] = tuple(terms[tensor] for tensor in args[2:])
            return ("freed", move)
        if node.target is fetch:
            if move not in self.freed:
                raise check_error(f"{node.name} fetches what has not left")
            return ("fetched", move)
        fetched = self.freed[args[0].args[1]]
        if not 0 <= args[1] < len(fetched):
            raise check_error(f"{node.name} makes what has not left")
        found: int = fetched[args[1]]
        return found


def moved_storages(node: fx.Node, held: Held) -> Mapping[int, int] | None:
    """The storages that a node of a move holds; None for one that makes a new one, of :func:`fetch`."""
    args: tuple[Any, ...] = node.args
    if node.target is send:
        return held[args[2]]
    if node.target is ready:
        return held[args[0]]
    return None if node.target is fetch else {}


def values_away(forward: fx.GraphModule, held: Held) -> dict[int, tuple[int, ...]]:
    """By move, the values that leave in a forward; each has left when nobody needs it there any more.

    Raises
    ------
    PlanError
        If a value is read or written over after it has been sent or freed, or is not one storage of its own.
    """
    moved: dict[int, tuple[int, ...]] = {}
    away: dict[int, set[int]] = {}
    gone: set[int] = set()
    for node in forward.graph.nodes:
        args: tuple[Any, ...] = node.args
        for source in node.all_input_nodes:
            if gone & {*held[source].values()}:
                raise check_error(f"{node.name} reads {source.name}, which has left for host memory")
        over = written_over(node)
        if over is not None and {*held[over].values()} & set().union(*away.values()):
            raise check_error(f"{node.name} writes over {over.name}, which leaves for host memory")
        if node.target is send:
            storages = held[args[2]]
            if len({*storages.values()}) != 1:
                raise check_error(f"{node.name} sends what is not one storage of the step")
            moved[args[1]], away[args[1]] = tuple(storages), {*storages.values()}
        elif node.target is freed:
            for tensor in args[2:]:
                if {*held[tensor].values()} != away[args[1]]:
                    raise check_error(f"{node.name} frees {tensor.name}, which has not been sent")
            gone |= away[args[1]]
    if gone != set().union(*away.values()):
        raise check_error("a value is sent to host memory and does not leave")
    return moved

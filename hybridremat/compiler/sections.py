"""A backward graph cut into sections, each of which ends where gradients are final.

They run one after the other and compute what the whole graph does, call by call, with the same values alive.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from hybridremat.compiler.direct_calls import call_directly
from hybridremat.compiler.final_gradients import FINAL
from hybridremat.graph.private_joint import Compiled
from hybridremat.graph.private_torch import boxed_nop
from hybridremat.graph.tracing.fx_nodes import joint_outputs

MOST: Final = 32
"""Sections of one graph: each has at least this part of the bytes of all gradients that are handed over."""


@dataclass(frozen=True)
class Section:
    """A part of a backward.

    Attributes
    ----------
    run
        Takes what the section before has left, boxed, the first one what the whole backward takes; returns
        its gradients and then what the next one takes.
    gradients
        Which of the whole backward's results are this section's.
    """

    run: Compiled
    gradients: tuple[int, ...]


def sections_of(module: fx.GraphModule, leaving: Collection[int]) -> tuple[Section, ...]:
    """The sections of a backward graph whose calls say which gradients are final.

    ``leaving``: the results that may be handed over before the end. The others are the last section's.
    """
    results = joint_outputs(module)
    nodes, final = _final([node for node in module.graph.nodes if node.op != "output"], results, leaving)
    ends = _ends(nodes, results, final)
    handed = {index for _, indices in ends for index in indices}
    made = [index for index, node in enumerate(results) if isinstance(node, fx.Node)]
    rest = tuple(index for index in made if index not in handed)
    if ends and ends[-1][0] == len(nodes) - 1:
        rest = (*ends.pop()[1], *rest)
    cuts = [*ends, (len(nodes) - 1, rest)]
    live = [node for node in nodes if node.op == "placeholder"]
    found, start = [], 0
    for number, (end, indices) in enumerate(cuts):
        later = {results[index] for _, others in cuts[number + 1 :] for index in others}
        later.update(source for node in nodes[end + 1 :] for source in node.all_input_nodes)
        after = [node for node in [*live, *nodes[start : end + 1]] if node in later]
        after = [node for node in dict.fromkeys(after) if node.op != "placeholder" or node in live]
        found.append(_section(module, live, nodes[start : end + 1], indices, after))
        live, start = after, end + 1
    return tuple(found)


def _final(
    nodes: Sequence[fx.Node], results: Sequence[Any], leaving: Collection[int]
) -> tuple[list[fx.Node], dict[fx.Node, list[int]]]:
    """The nodes, and those after which gradients are final: views that only make these come as soon."""
    order = {node: place for place, node in enumerate(nodes)}
    behind: dict[fx.Node, list[fx.Node]] = {}
    final: dict[fx.Node, list[int]] = {}
    for node in nodes:
        indices = [i for i in node.meta.get(FINAL, ()) if i in leaving and isinstance(results[i], fx.Node)]
        if node.op == "placeholder" or not indices:
            continue
        after = {user for user in node.users if user.target is operator.getitem}
        for index in indices:
            after |= _made_after(results[index], order[node], order)
        behind[node] = sorted(after, key=order.__getitem__)
        final[behind[node][-1] if after else node] = indices
    moved = {each for others in behind.values() for each in others}
    first = [node for node in nodes if node not in moved]
    placed = dict.fromkeys(each for node in first for each in (node, *behind.get(node, ())))
    return list(placed), final


def _made_after(gradient: fx.Node, place: int, order: Mapping[fx.Node, int]) -> set[fx.Node]:
    """The nodes after a place that a gradient is made of: views, as it is final there."""
    found: set[fx.Node] = set()
    waiting = [gradient]
    while waiting:
        node = waiting.pop()
        if order[node] > place and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _ends(
    nodes: Sequence[fx.Node], results: Sequence[Any], final: Mapping[fx.Node, Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """The places of the last nodes of all sections but the last one, each with its gradients."""
    least = sum(_bytes(results[index]) for indices in final.values() for index in indices) / MOST
    waiting, found = list[int](), []
    for place, node in enumerate(nodes):
        waiting += final.get(node, ())
        if node in final and sum(_bytes(results[index]) for index in waiting) >= least:
            found.append((place, tuple(waiting)))
            waiting = []
    return found


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _section(
    module: fx.GraphModule,
    before: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    indices: tuple[int, ...],
    after: Sequence[fx.Node],
) -> Section:
    """The section of some nodes, which takes ``before`` and leaves ``after``."""
    graph, results = fx.Graph(), joint_outputs(module)
    new = {node: graph.placeholder(node.name) for node in before}
    for node in nodes:
        if node.op != "placeholder":
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in [*(results[index] for index in indices), *after]))
    part = fx.GraphModule(module, graph)
    call_directly(part)
    return Section(boxed_nop(part, []), indices)

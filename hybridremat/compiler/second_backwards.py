"""Second backwards of one forward: refused where the first one has freed what is saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from hybridremat.errors import DoubleBackwardError
from hybridremat.graph.private_torch import backward_number, graph_is_retained, is_compiled_node, node_number


class BackwardToken:
    """Lives as long as the autograd graph of a forward; ``spent`` once a backward has run through it.

    ``again`` is called when another backward reaches it that the one before did not leave the graph for,
    ``kept`` when one reaches it that leaves the graph (``retain_graph=True``).
    """

    def __init__(self, again: Callable[[], None], kept: Callable[[], None] = lambda: None) -> None:
        self.spent = False
        self._again, self._leaves = again, kept
        self._latest = 0
        self._kept = False

    def spend(self, _gradients: object) -> None:
        """A backward reaches a node that this is registered with."""
        number = backward_number()
        if self.spent and number == self._latest:
            return
        if self.spent and not self._kept:
            self._again()
        self.spent, self._latest, self._kept = True, number, graph_is_retained()
        if self._kept:
            self._leaves()


def refuse_again(parts: str) -> DoubleBackwardError:
    """The error for a second backward; ``parts``: what could be done with the parts that each loss reads."""
    return DoubleBackwardError(
        "a second backward reached the same forward of a planned step, whose graph is one for all "
        "losses: the first backward has freed what is saved. Run one, (first + second).backward(), pass "
        f"retain_graph=True to the first (what is saved is then there longer than planned), or {parts}."
    )


def refuse_second_through(outputs: Iterable[object], since: int) -> None:
    """Refuse a second backward through one of several graphs of a step.

    ``outputs``: of its forward, which has made nodes from the number ``since`` on.
    """
    nodes = list(_compiled_nodes(outputs, since))
    if nodes:
        token = BackwardToken(_refuse_part)
        for node in nodes:
            node.register_prehook(token.spend)


def refuse_second_of(outputs: Iterable[object]) -> None:
    """Refuse a second backward of each of these, where it would reach a graph: it reaches it again."""
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            token = BackwardToken(partial(_refuse_output, weakref.ref(output)))
            output.grad_fn.register_prehook(token.spend)


def _refuse_part() -> None:
    raise refuse_again("name the parts that each loss alone reads as units of their own (units=)")


def _refuse_output(reference: weakref.ref[torch.Tensor]) -> None:
    output = reference()
    stack: list[Any] = [None if output is None else output.grad_fn]
    seen = set(stack)
    while stack:
        if (node := stack.pop()) is None:
            continue
        if is_compiled_node(node):
            _refuse_part()
        new = {after for after, _ in node.next_functions} - seen
        seen |= new
        stack += new


def _compiled_nodes(outputs: Iterable[object], since: int) -> Iterator[Any]:
    """The distinct nodes of compiled graphs, since a number, that some outputs are of, or are views of."""
    found: set[Any] = set()
    for output in outputs:
        node: Any = output.grad_fn if isinstance(output, torch.Tensor) else None
        while node is not None and node_number(node) >= since:
            if is_compiled_node(node):
                if node not in found:
                    found.add(node)
                    yield node
                break
            node = node.next_functions[0][0] if node.next_functions else None

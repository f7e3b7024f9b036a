"""Which gradients arrive at a planned backward, as autograd's engine alone knows it.

AOTAutograd fills the gradients of outputs that take no part in the loss with zeros, and so hands zeros to
parameters that plain autograd leaves without a gradient; weight decay and momentum then move what plain
training leaves alone. And it lets a backward with ``create_graph=True`` pass, to fail when the gradient of
the gradient is asked for. Hooks on the outputs see both: they run in the engine, right before the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from hybridremat.errors import DoubleBackwardError
from hybridremat.graph.private_torch import tangent_output


class Arrivals:
    """Follows the outputs of one compiled graph from the engine into the graph's backward."""

    def __init__(self) -> None:
        self._here = threading.local()  # the engine has a thread for each device

    def watch(self, outputs: Iterable[object]) -> None:
        """Note, at the next backward through these outputs, which of them have no gradient."""
        for index, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(partial(self._note, index))

    def _note(self, index: int, gradient: torch.Tensor | None) -> None:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "a backward with create_graph=True reached a planned step: it asks for the gradient of a "
                "gradient, and a plan covers one backward. Nothing of the planned backward has run. Call "
                "model.forward(…) instead of model(…) in such a step, which runs the plain model."
            )
        missing = self._missing()
        if gradient is None:
            missing.add(index)
        else:
            missing.discard(index)

    def _missing(self) -> set[int]:
        if not hasattr(self._here, "missing"):
            self._here.missing = set()
        missing: set[int] = self._here.missing
        return missing

    def keep_reached(
        self, backward: fx.Graph, run: Callable[[list[Any]], Sequence[Any]]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """A compiled backward that leaves out gradients which come from none that arrived.

        Parameters
        ----------
        backward
            The graph that ``run`` runs.
        run
            Takes its arguments boxed.
        """
        sources = gradient_sources(backward)

        def call(args: list[Any]) -> Sequence[Any]:
            gradients, missing = run(args), self._missing()
            if not missing:
                return gradients
            pairs = zip(gradients, sources, strict=True)
            return [None if source and source <= missing else gradient for gradient, source in pairs]

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def gradient_sources(backward: fx.Graph) -> list[frozenset[int | None]]:
    """For each result of a backward graph: the outputs of the model through whose gradients it is made.

    None stands for a tangent that is not an output's own (a base that several outputs are views of).
    """
    found: dict[fx.Node, frozenset[int | None]] = {}
    for node in backward.nodes:
        sources = frozenset[int | None]().union(*(found[source] for source in node.all_input_nodes))
        if node.op == "placeholder" and node.name.startswith("tangents_"):
            sources = frozenset([tangent_output(node)])
        found[node] = sources
    output = next(iter(backward.find_nodes(op="output")))
    return [found[item] if isinstance(item, fx.Node) else frozenset() for item in output.args[0]]

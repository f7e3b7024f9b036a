"""Outputs that take no part in the loss: gradients for them are refused, and holding them is noticed.

They are taken to be gone once the forward has returned. What the model stores on itself (``self.last = x``)
leaves the graph as an output too.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from hybridremat.errors import DoubleBackwardError, HeldOutputWarning, PlanMismatchError
from hybridremat.graph.private_torch import tangent_output
from hybridremat.units import format_bytes


class HeldOutputs:
    """Follows the outputs of one compiled graph from its forward to its backward.

    Parameters
    ----------
    expected
        Whether the plan counts them as held, so that there is nothing to notice.
    """

    def __init__(self, *, expected: bool) -> None:
        self._warned = expected
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def guard(
        self, outputs: Sequence[Any], detached: Sequence[int], inputs: Sequence[object]
    ) -> Sequence[Any]:
        """Give detached outputs a gradient edge that raises, and follow what is more than a scalar."""
        results = list(outputs)
        for index in detached:
            tensor = results[index].detach().requires_grad_()
            tensor.register_hook(_refuse_gradient(index, tuple(tensor.shape)))
            results[index] = tensor
        if not self._warned:
            self._follow(results, inputs)
        return type(outputs)(results) if isinstance(outputs, tuple) else results

    def _follow(self, outputs: Sequence[object], inputs: Sequence[object]) -> None:
        made = [output for output in outputs if isinstance(output, torch.Tensor) and output.dim()]
        given = {_address(value) for value in inputs if isinstance(value, torch.Tensor)} if made else set()
        self._alive = [weakref.ref(output) for output in made if _address(output) not in given]

    def warn_once(self) -> None:
        """Warn if an output is still alive when the backward starts."""
        held = [tensor for ref in self._alive if (tensor := ref()) is not None]
        self._alive = []
        size = sum({_address(tensor): _bytes(tensor) for tensor in held}.values())
        if self._warned or size == 0:
            return
        self._warned = True
        warnings.warn(
            f"{format_bytes(size)} of model outputs that are not part of the loss are still held during the "
            "backward, beyond what the plan counts. Drop them (loss = model(**batch).loss; what the model "
            "stores on itself counts too), or wrap with hold_outputs=True to have them counted.",
            HeldOutputWarning,
            stacklevel=2,
        )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _refuse_gradient(index: int, shape: tuple[int, ...]) -> Callable[[torch.Tensor], None]:
    def hook(gradient: torch.Tensor | None) -> None:
        if gradient is None:  # a node between here and the loss (DistributedDataParallel has one) passes none
            return
        raise PlanMismatchError(
            f"a gradient reached output {index} of the model, of shape {shape}. The step was planned for a "
            "loss inside the model (one of its outputs is a scalar), with no gradient for the other outputs. "
            'Wrap with grad_outputs="all" to let every output take part in the loss.'
        )

    return hook


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

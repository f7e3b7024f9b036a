"""A forward that saves its inputs alone, and runs once more after the backward that came to its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from hybridremat.errors import DoubleBackwardError
from hybridremat.graph.private_torch import is_traceable_wrapper_subclass, tree_leaves
from hybridremat.runtime.moments import Moment

Forward = Callable[[Sequence[Any], Mapping[str, Any]], Any]
Gradients = Sequence[torch.Tensor | None]
Came = Callable[[Gradients], None]
_PLAIN = (torch.Tensor, bool, int, float, str, type(None))


def differentiable(leaves: Sequence[Any]) -> list[int]:
    """The places of the outputs that gradients may come to, each tensor once."""
    first = {id(leaf): place for place, leaf in reversed(list(enumerate(leaves)))}
    return sorted(place for place in first.values() if _is_result(leaves[place]))


def can_be_deferred(leaves: Sequence[Any], others: Sequence[torch.Tensor]) -> bool:
    """Whether these are all results of a forward, and share no memory with ``others``."""
    known = all(isinstance(leaf, _PLAIN) for leaf in leaves)
    taken = {_memory(tensor) for tensor in others}
    return known and not any(_memory(leaf) in taken for leaf in leaves if _is_result(leaf) and leaf.numel())


def _is_result(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _memory(tensor: torch.Tensor) -> int:
    of_its_own = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    return tensor.untyped_storage().data_ptr() if of_its_own else id(tensor)


@dataclass(frozen=True)
class Again:
    """One call to be run once more; ``places`` are those of its differentiable outputs."""

    moment: Moment
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    places: Sequence[int]

    def run(self, planned: Forward, gradients: Gradients) -> None:
        """Run its planned forward and the backward, from gradients of the outputs in ``places``."""
        with self.moment.again():
            leaves = tree_leaves(planned(self.args, self.kwargs))
        pairs = [(leaves[p], g) for p, g in zip(self.places, gradients, strict=True) if g is not None]
        # edges, as a plan may count on outputs being dropped
        edges = [get_gradient_edge(output) for output, _ in pairs if output.requires_grad]
        brought = [gradient for output, gradient in pairs if output.requires_grad]
        del leaves, pairs, gradients
        if edges:
            torch.autograd.backward(edges, brought)


def deferred(
    results: Sequence[torch.Tensor], came: Came, reached: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The results as outputs of one node of autograd, which tells ``came`` of their gradients.

    ``reached``: what a backward may ask for by name, which autograd then runs this node for.
    """
    needed = torch.empty(0, requires_grad=True)  # so that autograd makes a node
    made: Sequence[torch.Tensor] = _Deferred.apply(came, results, needed, *reached)  # type: ignore[no-untyped-call]
    return made


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, came: Came, results: Sequence[torch.Tensor], *_reached: torch.Tensor) -> Any:
        ctx.came = came
        ctx.set_materialize_grads(False)
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "a backward with create_graph=True reached a planned step: it asks for the gradient of a "
                "gradient, and a plan covers one backward. Call model.forward(…) instead of model(…) in such "
                "a step, which runs the plain model."
            )
        ctx.came(gradients)
        return (None,) * len(ctx.needs_input_grad)

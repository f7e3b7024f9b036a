"""An opaque call while it is traced: its two ops, and autograd between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridremat.graph.opaque.ops import opaque_op
from hybridremat.graph.opaque.region import region_of
from hybridremat.graph.opaque.trial import OpaqueOp
from hybridremat.graph.private_torch import tree_unflatten


class _Opaque(torch.autograd.Function):
    """The two ops as autograd traces them; views are made outside of them."""

    @staticmethod
    def forward(ctx: Any, op: OpaqueOp, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        ctx.set_materialize_grads(False)
        new = op.forward(inputs[0], list(inputs[1:]))
        places = op.described.places[: len(op.results)]
        results = [place.of(new[place.index]) for place in places if place is not None]
        ctx.save_for_backward(*(inputs[i] for i in op.kept_inputs), *(new[i] for i in op.kept_new))
        edges = [edge for edge, place in zip(op.template.outputs, places, strict=True) if place is not None]
        ctx.mark_non_differentiable(*(r for r, e in zip(results, edges, strict=True) if e is None))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        op: OpaqueOp = ctx.op
        left = iter(grads)
        of_results = [None if p is None else next(left) for p in op.described.places[: len(op.results)]]
        pairs = zip(of_results, op.template.outputs, strict=True)
        all_grads = [grad if edge is not None else None for grad, edge in pairs]
        kept = list(ctx.saved_tensors)
        new = op.backward(all_grads, kept)
        given = [*(grad for grad in all_grads if grad is not None), *kept]
        places = op.gradients_for(all_grads).described.places
        return None, *(
            None if place is None else place.of((new if place.new else given)[place.index])
            for place in places
        )


def call(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    own: Sequence[Tensor] = (),
) -> Any:
    """Call a function, while it is traced, as one op with a backward of its own.

    ``own``: its arguments that are leaves of the step.

    Raises
    ------
    CaptureError
        If it cannot be one op.
    """
    region, given = region_of(name, function, args, kwargs or {}, own)
    op = opaque_op(region)
    tensors = iter(_Opaque.apply(op, *given))  # type: ignore[no-untyped-call]
    leaves = [
        leaf if place is None else next(tensors)
        for leaf, place in zip(op.results, op.described.places, strict=False)
    ]
    return tree_unflatten(leaves, op.structure)

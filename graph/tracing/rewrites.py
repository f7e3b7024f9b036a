"""Ops of a joint graph put in the place of others that compute the same, so that less is alive at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import fx

from hybridremat.graph.tracing.gradient_slices import SlicedGradient, make_by_slices, sliced_gradients
from hybridremat.graph.tracing.loss_fusion import fuse_loss_backward, fusible_losses, read_losses_once


@dataclass(frozen=True)
class Rewrites:
    """How a joint graph may be rewritten.

    Attributes
    ----------
    proven
        Tells whether a gradient has the same bits if it is made slice by slice.
    exact
        Whether gradients of losses are fused.
    chunked
        Whether losses are to be made by chunks of rows, with other bits.
    several
        Whether the step has other graphs, in which the losses may be.
    """

    proven: Callable[[SlicedGradient], bool]
    exact: bool = True
    chunked: bool = False
    several: bool = False


@dataclass(frozen=True)
class Originals:
    """A joint graph as it was before its losses were made by chunks, and before it was rewritten exactly."""

    whole: fx.GraphModule | None = None
    exact: fx.GraphModule | None = None


NOT_REWRITTEN: Final = Originals()


def rewrite(module: fx.GraphModule, num_outputs: int, rewrites: Rewrites) -> Originals:
    """Make losses by chunks if that is asked for, then gradients of losses and concatenations, in place.

    Raises
    ------
    ModelError
        If losses are to be made by chunks, and none can be.
    """
    whole = None
    if rewrites.chunked:
        from hybridremat.graph.tracing.loss_chunks import make_losses_by_chunks, no_loss_by_chunks

        before = _copied(module)
        if not (why := make_losses_by_chunks(module, num_outputs)):
            whole = before
        elif not rewrites.several:
            raise no_loss_by_chunks(why)
    losses = fusible_losses(module) if rewrites.exact else []
    sliced = [each for each in sliced_gradients(module) if rewrites.proven(each)]
    if not losses and not sliced:
        return Originals(whole)
    read_losses_once(losses)
    exact = _copied(module)
    fuse_loss_backward(module, losses)
    for each in sliced:
        make_by_slices(module, each)
    module.graph.eliminate_dead_code()
    return Originals(whole, exact)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    copied = fx.Graph()
    copied.output(copied.graph_copy(module.graph, {}))
    return fx.GraphModule(module, copied)

"""Ops of a joint graph put in the place of others that compute the same, so that less is alive at once."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from hybridremat.graph.tracing.gradient_slices import SlicedGradient, make_by_slices, sliced_gradients
from hybridremat.graph.tracing.loss_fusion import fuse_loss_backward, fusible_losses, read_losses_once

Proven = Callable[[SlicedGradient], bool]


def rewrite(module: fx.GraphModule, proven: Proven) -> fx.GraphModule:
    """Make gradients of losses and of concatenations anew, in place.

    ``proven`` says whether a gradient has the same bits if it is made slice by slice.

    Returns the graph as it was before; the module itself if there was nothing to do.
    """
    losses = fusible_losses(module)
    sliced = [each for each in sliced_gradients(module) if proven(each)]
    if not losses and not sliced:
        return module
    read_losses_once(losses)
    copied = fx.Graph()
    copied.output(copied.graph_copy(module.graph, {}))
    original = fx.GraphModule(module, copied)
    fuse_loss_backward(module, losses)
    for each in sliced:
        make_by_slices(module, each)
    module.graph.eliminate_dead_code()
    return original

"""Lookups in an embedding that is split by rows, where a graph ends before they are summed up.

Each rank looks up the rows that it has. Which tokens are another rank's, ``DTensor`` keeps in a buffer of the
result's placement until the results are summed up, and all lookups in this embedding share the placement. A
graph that ends in between leaves its mask there, made up if it was captured, by which later lookups fail.
"""

from __future__ import annotations

from torch import nn

from hybridremat.errors import CaptureError
from hybridremat.graph.private_collectives import empty_masks
from hybridremat.graph.private_torch import TorchDynamoException, is_traced


def cut_lookup(model: nn.Module, error: BaseException) -> CaptureError | None:
    """What an error means that ended a capture between a lookup and its sum; masks are gone in any case."""
    masks = empty_masks() if any(hasattr(each, "placements") for each in model.parameters()) else []
    if not is_traced(masks) and not (masks and isinstance(error, TorchDynamoException)):
        return None
    return CaptureError(
        "a graph ends between the lookup in an embedding that is split by rows (RowwiseParallel) and the sum "
        "of the ranks' results, and PyTorch compiles no half of it. Name units (units=) without the "
        "embedding: what runs between them then runs as it is."
    )

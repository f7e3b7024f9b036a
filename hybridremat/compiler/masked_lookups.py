"""Lookups in an embedding that is split by rows, where a graph ends before they are summed up.

Each rank looks up the rows that it has. Which tokens are another rank's, ``DTensor`` keeps in a buffer of the
result's placement until the results are summed up, and all lookups in this embedding share the placement. A
graph that ends in between leaves the made-up tensor of its capture there, by which all later lookups fail.
"""

from __future__ import annotations

from torch import nn

from hybridremat.errors import CaptureError, HybridRematError
from hybridremat.graph.private_collectives import empty_masks


def cut_lookup(model: nn.Module, error: Exception) -> CaptureError | None:
    """What an error of a capture means if it came between a lookup and its sum; the buffers are emptied."""
    weights = (module.weight for module in model.modules() if isinstance(module, nn.Embedding))
    in_rows = any(each.is_shard(0) for weight in weights for each in getattr(weight, "placements", ()))
    if not in_rows or not empty_masks() or isinstance(error, HybridRematError):
        return None
    return CaptureError(
        "a graph ends between the lookup in an embedding that is split by rows (RowwiseParallel) and the sum "
        "of the ranks' results, and PyTorch compiles no half of it. Name units (units=) without the "
        "embedding: what runs between them then runs as it is."
    )

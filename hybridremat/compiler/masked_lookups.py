"""Lookups in an embedding that is split by rows, where a graph ends before they are summed up.

Each rank looks up the rows that it has. Which tokens are another rank's, ``DTensor`` keeps in a buffer of the
result's placement until the results are summed up, and all lookups in this embedding share the placement. A
graph that ends in between leaves the made-up tensor of its capture there, by which all later lookups fail.
"""

from __future__ import annotations

from torch import nn

from hybridremat.errors import CaptureError
from hybridremat.graph.private_collectives import empty_made_up_masks


def cut_lookup(model: nn.Module) -> CaptureError | None:
    """What ended a capture of a model between a lookup and its sum, if so; its masks are gone then."""
    if not any(hasattr(each, "placements") for each in model.parameters()) or not empty_made_up_masks():
        return None
    return CaptureError(
        "a graph ends between the lookup in an embedding that is split by rows (RowwiseParallel) and the sum "
        "of the ranks' results, and PyTorch compiles no half of it. Name units (units=) without the "
        "embedding: what runs between them then runs as it is."
    )

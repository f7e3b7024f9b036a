"""Lookups in an embedding that is split by rows, where a graph ends before they are summed up.

Each rank looks up the rows that it has. Which tokens are another rank's, ``DTensor`` keeps in a buffer of the
result's placement until the results are summed up, and all lookups in this embedding share the placement. A
graph that ends in between leaves the made-up tensor of its capture there, by which all later lookups fail.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

from hybridremat.errors import CaptureError
from hybridremat.graph.tracing.fx_nodes import tensors


def looks_up_in_rows(modules: Iterable[nn.Module]) -> bool:
    """Whether one of the modules is an embedding that is split by rows."""
    weights = (module.weight for module in modules if isinstance(module, nn.Embedding))
    return any(each.is_shard(0) for weight in weights for each in getattr(weight, "placements", ()))


def release_masks(module: fx.GraphModule) -> bool:
    """Empty the buffers that the capture of a graph has left; returns whether there were any."""
    values = (value for node in module.graph.nodes for value in tensors(node.meta.get("example_value")))
    placements = (placement for value in values for placement in getattr(value, "placements", ()))
    buffers = [each.mask_buffer for each in placements if hasattr(each, "mask_buffer")]
    left = [buffer for buffer in buffers if buffer.data is not None]
    for buffer in left:
        buffer.data, buffer.refcount = None, 0
    return bool(left)


def masked_lookup() -> CaptureError:
    """The error of a graph that ends before a lookup is summed up."""
    return CaptureError(
        "a graph ends between the lookup in an embedding that is split by rows (RowwiseParallel) and the sum "
        "of the ranks' results, and PyTorch compiles no half of it. Name units (units=) without the "
        "embedding: what runs between them then runs as it is."
    )

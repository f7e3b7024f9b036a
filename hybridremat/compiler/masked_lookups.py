"""Lookups in an embedding that is split by rows, where a graph ends before they are summed up.

Each rank looks up the rows that it has. Which tokens are another rank's, ``DTensor`` keeps in a buffer of the
result's placement until the results are summed up, and all lookups in this embedding share the placement. A
graph that ends in between leaves the made-up tensor of its capture there, by which all later lookups fail.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

from hybridremat.errors import CaptureError, HybridRematError
from hybridremat.graph.private_collectives import empty_masks, has_full_mask
from hybridremat.graph.tracing.fx_nodes import tensors


def looks_up_in_rows(modules: Iterable[nn.Module]) -> bool:
    """Whether one of the modules is an embedding that is split by rows."""
    weights = (module.weight for module in modules if isinstance(module, nn.Embedding))
    return any(each.is_shard(0) for weight in weights for each in getattr(weight, "placements", ()))


def refuse_cut_lookup(module: fx.GraphModule) -> None:
    """Refuse a graph of Dynamo's that ends before a lookup in it is summed up: a buffer is full.

    Raises
    ------
    CaptureError
    """
    if has_full_mask(v for node in module.graph.nodes for v in tensors(node.meta.get("example_value"))):
        empty_masks()
        raise _cut()


def cut_lookup(model: nn.Module, error: Exception) -> CaptureError | None:
    """What an error of a capture means if it came between a lookup and its sum; the buffers are emptied."""
    if not looks_up_in_rows(model.modules()) or not empty_masks() or isinstance(error, HybridRematError):
        return None
    return _cut()


def _cut() -> CaptureError:
    """The error of a graph that ends before a lookup is summed up."""
    return CaptureError(
        "a graph ends between the lookup in an embedding that is split by rows (RowwiseParallel) and the sum "
        "of the ranks' results, and PyTorch compiles no half of it. Name units (units=) without the "
        "embedding: what runs between them then runs as it is."
    )

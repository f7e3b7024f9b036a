"""Products of groups of rows, as in a mixture of experts: an argument ``offs`` says where each group ends.

How much such a kernel does depends on the numbers in ``offs``. It is taken at its most: every row belongs to
some group, and its temporary memory is that of one group with all rows.
"""

from __future__ import annotations

from torch import fx

from hybridremat.graph.nodes import argument, tensors


def group_ends(node: fx.Node) -> fx.Node | None:
    """The argument that says where groups end; None if the node is no grouped product."""
    ends = argument(node, "offs")
    return ends if isinstance(ends, fx.Node) and len(_factors(node)) == 2 else None


def _factors(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.args[:2] if isinstance(a, fx.Node) and tensors(a.meta.get("val"))]


def grouped_rows(node: fx.Node) -> int:
    """Length of the dimension that is cut into groups."""
    left, right = (factor.meta["val"] for factor in _factors(node))
    if left.dim() == right.dim() == 2:
        return int(left.shape[-1])
    return int(left.shape[-2] if left.dim() == 2 else right.shape[-1])


def grouped_flops(node: fx.Node) -> int:
    """Flops of a grouped product, which PyTorch's registry lacks: one product for each of its results."""
    if group_ends(node) is None:
        return 0
    left, right = (factor.meta["val"] for factor in _factors(node))
    rows = int(left.shape[-2]) * (int(left.shape[0]) if left.dim() == right.dim() == 3 else 1)
    return 2 * rows * int(left.shape[-1]) * int(right.shape[-1]) * len(tensors(node.meta["val"]))

"""Whether a call of a backward is in proportion to the gradient that arrives, whatever else it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.tracing.fx_nodes import is_zero, put_back

_ATEN: Final = torch.ops.aten
_IN_FIRST: Final = (
    *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.detach.default),
    *(_ATEN.alias.default, _ATEN.clone.default, _ATEN._to_copy.default, _ATEN.expand.default),
    *(_ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.t.default),
    *(_ATEN.permute.default, torch.ops.prims.convert_element_type.default),
    *(_ATEN.slice.Tensor, _ATEN.slice_backward.default, _ATEN.neg.default),
    *(_ATEN.sum.default, _ATEN.sum.dim_IntList, _ATEN.mean.default, _ATEN.mean.dim),
    *(_ATEN.mul.Scalar, _ATEN.div.Tensor, _ATEN.div.Scalar),
    *(_ATEN.nll_loss_backward.default, _ATEN._log_softmax_backward_data.default),
    *(_ATEN._softmax_backward_data.default, _ATEN.tanh_backward.default, _ATEN.sigmoid_backward.default),
    *(_ATEN.gelu_backward.default, _ATEN.silu_backward.default, _ATEN.threshold_backward.default),
)
_LINEAR: Final[dict[object, tuple[tuple[int, ...], ...]]] = {  # op → which arguments, taken together
    **dict.fromkeys(_IN_FIRST, ((0,),)),
    _ATEN.mul.Tensor: ((0,), (1,)),
    _ATEN.mm.default: ((0,), (1,)),
    _ATEN.slice_scatter.default: ((1,),),
    _ATEN.add.Tensor: ((0, 1),),
    _ATEN.sub.Tensor: ((0, 1),),
    _ATEN.where.self: ((1, 2), (1,), (2,)),
    _ATEN.masked_fill.Scalar: ((0,),),
}
_REAL: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_linear(node: fx.Node, changing: Callable[[fx.Node], bool]) -> bool:
    """Whether what a call gives is in proportion to those of its inputs that are ``changing``.

    A conversion between types of real numbers is, but for rounding; one to whole numbers or truths is not.
    """
    args: Any = node.args
    places = tuple(place for place, each in enumerate(args) if isinstance(each, fx.Node) and changing(each))
    value = node.meta.get("val")
    if places not in _LINEAR.get(node.target, ()) or not isinstance(value, torch.Tensor):
        return False
    if node.target is _ATEN.slice_scatter.default:
        return put_back(node) is not None and value.dtype in _REAL
    if node.target is _ATEN.masked_fill.Scalar and args[2] != 0:
        return False
    if node.target is _ATEN.where.self and len(places) == 1:
        return is_zero(args[3 - places[0]]) and value.dtype in _REAL
    return value.dtype in _REAL

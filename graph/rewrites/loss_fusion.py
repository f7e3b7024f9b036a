"""Two ops of a loss over classes as one: the gradient of its log-probabilities, and that of its logits.

The first is as large as the logits, and only the second reads it. As one op they can be run by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from hybridremat.graph.rewrites.rewrite import Call, Joint, Rewrite
from hybridremat.graph.tracing.fx_nodes import NUMBERS, Numbers

_ATEN: Final = torch.ops.aten
_NLL: Final = _ATEN.nll_loss_backward.default
_LOG_SOFTMAX: Final = _ATEN._log_softmax_backward_data.default


@torch.library.custom_op("hybridremat::nll_log_softmax_backward", mutates_args=())
def nll_log_softmax_backward(
    gradient: Tensor,
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """``nll_loss_backward``, then ``_log_softmax_backward_data`` over the classes: (rows, classes)."""
    arrived = _NLL(gradient, log_probabilities, target, weight, reduction, ignore_index, total_weight)
    result: Tensor = _LOG_SOFTMAX(arrived, log_probabilities, 1, log_probabilities.dtype)
    return result


@nll_log_softmax_backward.register_fake
def _(_gradient: Tensor, log_probabilities: Tensor, *_: object) -> Tensor:
    return torch.empty_like(log_probabilities)


LOSS_BACKWARD: Final = torch.ops.hybridremat.nll_log_softmax_backward.default


def _pairs(joint: Joint) -> list[fx.Node]:
    """The second op of each pair; both are let read the same log-probabilities, by the same node."""
    found = joint.module.graph.find_nodes(op="call_function", target=_LOG_SOFTMAX)
    pairs = [node for node in found if _fits(node)]
    for node in pairs:
        probabilities, first = _attached(node.args[1]), node.args[0]
        first.args = (first.args[0], probabilities, *first.args[2:])
        node.args = (first, probabilities, *node.args[2:])
    return pairs


def _fuse(joint: Joint, pairs: Sequence[fx.Node]) -> None:
    for node in pairs:
        arrived: Any = node.args[0]
        with joint.module.graph.inserting_before(node):
            fused = joint.module.graph.call_function(LOSS_BACKWARD, arrived.args)
        fused.meta = {**node.meta, NUMBERS: Numbers()}
        node.replace_all_uses_with(fused)
        joint.module.graph.erase_node(node)
        joint.module.graph.erase_node(arrived)


def _attached(node: Any) -> Any:
    """What a node detaches from the graph of autograd: the same tensor."""
    while isinstance(node, fx.Node) and node.target is _ATEN.detach.default:
        node = node.args[0]
    return node


def _fits(node: fx.Node) -> bool:
    """Whether the gradient of log-probabilities (rows, classes) is read here alone."""
    arrived, probabilities, dim, dtype = node.args
    return (
        isinstance(arrived, fx.Node)
        and arrived.target is _NLL
        and len(arrived.users) == 1
        and isinstance(probabilities, fx.Node)
        and _attached(arrived.args[1]) is _attached(probabilities)
        and probabilities.meta["val"].dim() == 2
        and dim in (1, -1)
        and dtype == probabilities.meta["val"].dtype
        and len(arrived.args) == 7
        and not arrived.kwargs
    )


def _term(call: Call, _plain: Callable[[fx.Node], Call]) -> Call | None:
    """One call is two."""
    if call.target is not LOSS_BACKWARD:
        return None
    probabilities = call.args[1]
    return Call(_LOG_SOFTMAX, (Call(_NLL, call.args), probabilities, 1, probabilities.meta["val"].dtype))


LOSS_FUSION: Final = Rewrite(name="the gradient of a loss as one op", find=_pairs, write=_fuse, term=_term)

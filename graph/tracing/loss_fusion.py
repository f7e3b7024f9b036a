"""Two ops of a loss over classes as one: the gradient of its log-probabilities, and that of its logits.

The first is as large as the logits, and only the second reads it. As one op they can be run by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from hybridremat.graph.tracing.by_parts import ATEN, LOSS_BACKWARD

_NLL = ATEN.nll_loss_backward.default
_DETACH = ATEN.detach.default
_LOG_SOFTMAX = ATEN._log_softmax_backward_data.default


def fusible_losses(module: fx.GraphModule) -> list[fx.Node]:
    """The second ops of such pairs."""
    nodes = module.graph.find_nodes(op="call_function", target=_LOG_SOFTMAX)
    return [node for node in nodes if _fits(node)]


def read_losses_once(losses: Sequence[fx.Node]) -> None:
    """Let both ops of each pair read the same log-probabilities, by the same node."""
    for node in losses:
        probabilities, first = _attached(node.args[1]), node.args[0]
        assert isinstance(first, fx.Node)
        first.args = (first.args[0], probabilities, *first.args[2:])
        node.args = (first, probabilities, *node.args[2:])


def fuse_loss_backward(module: fx.GraphModule, losses: Sequence[fx.Node]) -> None:
    """Make one op of each pair, in place."""
    for node in losses:
        arrived: Any = node.args[0]
        with module.graph.inserting_before(node):
            fused = module.graph.call_function(LOSS_BACKWARD, arrived.args)
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        module.graph.erase_node(node)
        module.graph.erase_node(arrived)


def _attached(node: Any) -> Any:
    """What a node detaches from the graph of autograd: the same tensor."""
    while isinstance(node, fx.Node) and node.target is _DETACH:
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

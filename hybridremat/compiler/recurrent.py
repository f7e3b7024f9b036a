"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: PyTorch's kernels as opaque calls, on CPU one for each layer.

A layer begins with the dropout of what it reads, as in PyTorch's own loop over layers. cuDNN has one kernel
for all layers, which is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from hybridremat.errors import CaptureError

_KERNELS: Final = {name: getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


def make_recurrent_opaque(module: fx.GraphModule) -> None:
    """Make PyTorch's recurrent kernels in one of Dynamo's graphs opaque calls. Weights are its leaves.

    Raises
    ------
    CaptureError
        For packed sequences.
    """
    for name, kernel in _KERNELS.items():
        for node in module.graph.find_nodes(op="call_function", target=kernel):
            if isinstance(node.args[3], (list, tuple)):  # its weights; else whether they have a bias
                raise CaptureError(
                    f"a recurrent module ({name}) is given a PackedSequence, whose lengths decide how much "
                    "memory a step takes. Give it a padded tensor, and mask what is beyond the lengths."
                )
            own = [weight.op == "placeholder" for weight in node.args[2]]
            node.target = _opaque(name, own)
    module.recompile()


def call(name: str, kernel: Callable[..., Any], given: Sequence[Any], *, own: Sequence[Tensor]) -> Any:
    """See :func:`hybridremat.graph.opaque.traced.call`, which is loaded with the first."""
    from hybridremat.graph.opaque import traced

    return traced.call(name, kernel, tuple(given), own=own)


def _opaque(name: str, own: Sequence[bool]) -> Callable[..., Any]:
    """What stands for a kernel in the graph; ``own``: which weights are leaves."""

    def run(source: Tensor, hx: Any, params: Sequence[Tensor], *others: Any) -> Any:
        leaves = [weight for weight, leaf in zip(params, own, strict=True) if leaf]
        if source.device.type == "cpu":
            return _by_layers(name, leaves, source, hx, params, *others)
        return call(name, _KERNELS[name], (source, hx, params, *others), own=leaves)

    run.__name__ = name
    return run


def _by_layers(
    name: str,
    leaves: Sequence[Tensor],
    source: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The kernel, layer by layer: output, and the last states (two for an LSTM)."""
    result = source.transpose(0, 1) if batch_first else source
    count = len(params) // num_layers
    first = [state.split(2 if bidirectional else 1) for state in (hx if name == "lstm" else (hx,))]
    last: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        before = dropout if layer and train else 0.0
        weights = tuple(params[layer * count : (layer + 1) * count])
        states = tuple(each[layer] for each in first)
        given = result, states, weights, has_biases, before, train, bidirectional
        result, *ends = call(name, _LAYERS[name], given, own=leaves)
        last.append(tuple(ends))
    result = result.transpose(0, 1) if batch_first else result
    return result, *(torch.cat(ends) if len(ends) > 1 else ends[0] for ends in zip(*last, strict=True))


def _layer(name: str) -> Callable[..., Any]:
    """One layer of a kernel, with the dropout before it."""

    def run(
        source: Tensor,
        states: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        has_biases: bool,
        before: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        read = torch.dropout(source, before, train=True) if before else source
        hx = states if name == "lstm" else states[0]
        return _KERNELS[name](read, hx, weights, has_biases, 1, 0.0, train, bidirectional, False)

    return run


_LAYERS: Final = {name: _layer(name) for name in _KERNELS}

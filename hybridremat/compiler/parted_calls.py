"""The part of the checker that knows which plain op a kernel by parts stands for."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.tracing import by_chunks, by_parts

BY_PARTS: Final[dict[object, Any]] = {
    by_chunks.loss_by_rows: by_chunks.loss_by_chunks,
    by_parts.loss_backward_by_rows: by_parts.LOSS_BACKWARD,
    by_parts.dropout_by_rows: torch.ops.aten.native_dropout.default,
    by_parts.Drawing.DROPOUT: torch.ops.aten.native_dropout.default,
    by_parts.dropout_backward_by_rows: torch.ops.aten.native_dropout_backward.default,
    by_parts.batch_norm_backward_by_channels: torch.ops.aten.native_batch_norm_backward.default,
    by_parts.convolution_by_samples: torch.ops.aten.convolution.default,
    by_parts.convolution_backward_by_samples: torch.ops.aten.convolution_backward.default,
    by_parts.convolution_backward_by_halves: torch.ops.aten.convolution_backward.default,
}


def op_of(node: fx.Node) -> object:
    """The target of a call, or the plain op that it stands for."""
    return BY_PARTS.get(node.target, node.target)

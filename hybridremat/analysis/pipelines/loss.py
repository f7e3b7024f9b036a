"""What a loss outside the model takes on the last stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridremat.analysis.pipelines.frontiers import phase_times, piece_frontier
from hybridremat.analysis.pipelines.request import LossFunction, PipelineRequest
from hybridremat.graph.private_torch import tree_leaves


@dataclass(frozen=True)
class LossCosts:
    """Nanoseconds and bytes of a loss for one microbatch; nothing without one.

    Attributes
    ----------
    forward, backward
        Nanoseconds.
    held
        Bytes that wait for its backward.
    peak
        Most bytes beside the model's outputs: those of the gradients that go into the model among them.
    target
        Bytes of what it is compared with.
    """

    forward: int = 0
    backward: int = 0
    held: int = 0
    peak: int = 0
    target: int = 0


class _Loss(nn.Module):
    """A loss of outputs that are parameters, so that their gradients are those of a step."""

    def __init__(self, outputs: list[Tensor], loss: LossFunction) -> None:
        super().__init__()
        self.outputs = nn.ParameterList(outputs)
        self.loss = loss

    def forward(self, target: Any) -> Any:
        outputs = [*self.outputs]
        return self.loss(outputs[0] if len(outputs) == 1 else tuple(outputs), target)


def loss_costs(outputs: list[Tensor], request: PipelineRequest) -> LossCosts:
    """The costs of the loss that was asked for, of outputs like these, which have no values.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.frontier`, of the loss as a model.
    """
    if request.loss is None:
        return LossCosts()
    module = _Loss([each.detach().requires_grad_() for each in outputs], request.loss)
    frontier = piece_frontier(module, (request.target,), request.settings, searched=False)
    forward, backward = phase_times(frontier)
    tensors = [each for each in tree_leaves(request.target) if isinstance(each, Tensor)]
    return LossCosts(
        forward,
        backward,
        frontier.plain.phases.between,
        frontier.plain.phases.peak,
        sum(each.numel() * each.element_size() for each in tensors),
    )


def without_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor to be captured."""
    return torch.zeros(shape, dtype=dtype, device=device)

"""Training steps whose every number is kept or compared, and whose memory and time are measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridremat.graph.costs.allocations import peaks_of
from hybridremat.graph.garbage import without_collection

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Subject:
    """A model with what it is trained on; ``optimizer``: by what, if that is not a new AdamW."""

    model: nn.Module
    batch: Mapping[str, Any]
    loss_fn: Callable[[Any], Tensor]
    args: Sequence[Any] = ()
    optimizer: torch.optim.Optimizer | None = None

    def timed_step(self) -> None:
        """A step with that of its optimizer, if it has one."""
        self.step()
        if self.optimizer is not None:
            self.optimizer.step()

    def step(self) -> Tensor:
        """Forward, loss and backward; returns the loss."""
        loss = self.loss_fn(self.model(*self.args, **self.batch))  # the output is dropped before the backward
        loss.backward()
        return loss.detach()

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return next(self.model.parameters()).device.type


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that models are trained with."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def train(subject: Subject, steps: int) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Train with AdamW and yield, after each step, copies of all its tensors and its peak in bytes."""
    optimizer = subject.optimizer or adamw(list(subject.model.parameters()))
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        peak = _peak(lambda kept=losses: kept.append(subject.step()), subject.device)  # type: ignore[misc]
        tensors = {"loss": losses[0]}
        named = list(subject.model.named_parameters())
        tensors |= {f"gradient {name}": p.grad for name, p in named if p.grad is not None}
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        optimizer.step()
        tensors |= {f"buffer {name}": buffer.clone() for name, buffer in subject.model.named_buffers()}
        tensors |= {f"parameter {n}": p.detach().clone() for n, p in named}
        yield tensors, peak


def differences(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """Names of what is not equal bit for bit."""
    if tensors.keys() != others.keys():
        return sorted(tensors.keys() ^ others.keys())
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]


def time_ratio(plain: Subject, planned: Subject, pairs: int, on_pair: Callable[[], None]) -> float:
    """Median over pairs of steps, taken in turn, of planned time over plain time."""
    return median_ratio(paired_seconds(plain, planned, pairs, on_pair))


def paired_seconds(
    plain: Subject, planned: Subject, pairs: int, on_pair: Callable[[], None]
) -> list[tuple[float, float]]:
    """Wall seconds of plain and planned steps, taken in turn."""
    seconds = []
    for _ in range(pairs):
        seconds.append((_seconds(plain), _seconds(planned)))
        on_pair()
    return seconds


def median_ratio(seconds: Sequence[tuple[float, float]]) -> float:
    """The median of the second over the first of each pair."""
    return statistics.median(second / first for first, second in seconds)


def _peak(step: Callable[[], None], device: str) -> int:
    with without_collection():
        ((peak, _),) = peaks_of([lambda: step], device)
    return peak


def _seconds(subject: Subject) -> float:
    subject.model.zero_grad()
    _wait(subject)
    started = time.perf_counter()
    subject.timed_step()
    _wait(subject)
    return time.perf_counter() - started


def _wait(subject: Subject) -> None:
    if subject.device == "cuda":
        torch.cuda.synchronize()

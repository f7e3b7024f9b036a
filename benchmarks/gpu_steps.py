"""Models of one stage of the GPU benchmark: made, prepared by its method, and what a batch of them needs."""

from __future__ import annotations

import gc
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from gpu_methods import METHODS, Task
from gpu_models import BENCHES
from torch import Tensor, nn

import hybridremat
from hybridremat.analysis.measure import measure

ROOM_ON_CPU = 48 << 20  # bytes of the dry run, in place of what a card has left


@dataclass(frozen=True)
class Order:
    """What to do within ``seconds``, which end ``until`` (seconds of the epoch).

    ``batch`` None: find the one to compare at.
    """

    model: str
    method: str
    device: str
    small: bool
    seconds: float
    until: float
    batch: int | None
    limit: int | str
    workers: int | None


class Steps:
    """The models of one stage, by batch."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.bench, self.method = BENCHES[order.model], METHODS[order.method]

    def prepare(self, model: nn.Module, inputs: dict[str, Tensor], limit: int | str) -> None:
        """Do what the method does."""
        self.method.prepare(Task(model, inputs, limit, self.bench.layer, self.order.workers))

    def make(self, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """A model and a batch for it, what was there before given back."""
        self._empty()
        return self.bench.make(batch, self.order.device, small=self.order.small)

    def room(self, model: nn.Module) -> int:
        """Bytes that are there for a step beside parameters and AdamW's state."""
        return hybridremat.auto_limit(model).limit if self.order.device == "cuda" else ROOM_ON_CPU

    def need(self, batch: int, room: int) -> int:
        """Bytes that a step of this batch takes; more than ``room`` where there is not enough memory."""
        try:
            model, inputs = self.make(batch)
            if self.method.compiler:
                return self._least(model, inputs)
            self.prepare(model, inputs, self.order.limit)
            return measure(model, kwargs=inputs, repeats=1).peak
        except torch.OutOfMemoryError:
            return room + room // 8

    def _least(self, model: nn.Module, inputs: dict[str, Tensor]) -> int:
        """The least that a plan takes; of a compiled step, what its code takes."""
        how: dict[str, Any] = {"kwargs": inputs, "workers": self.order.workers, "progress": False}
        if self.method.compiler == "eager":
            return hybridremat.plan(model, memory_limit="100000%", **how).least_peak
        how |= {"compiler": self.method.compiler, "on_infeasible": "least"}
        with warnings.catch_warnings(action="ignore", category=hybridremat.InfeasibleLimitWarning):
            return hybridremat.plan(model, memory_limit=1, **how).predicted_peak

    def _empty(self) -> None:
        gc.collect()
        torch._dynamo.reset()
        if self.order.device == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Wait for the device."""
        if self.order.device == "cuda":
            torch.cuda.synchronize()

    def left(self) -> float:
        """Seconds until the process is ended."""
        return self.order.until - time.time()

    def rate(self, batch: int, seconds: float) -> float:
        """Tokens or images a second."""
        return batch * self.bench.sample(small=self.order.small) / seconds

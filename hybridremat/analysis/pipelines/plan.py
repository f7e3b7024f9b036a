"""The plan of a pipeline: its stages, what to pass to PyTorch and to ``wrap``, and the step on clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hybridremat.analysis.pipelines.pieces import StageInput
from hybridremat.analysis.pipelines.text import pipeline_text
from hybridremat.errors import LimitError
from hybridremat.sequence.pipeline.orders import ScheduleName
from hybridremat.sequence.pipeline.replay import Span

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One stage of a pipeline; bytes, and nanoseconds for one microbatch.

    Attributes
    ----------
    index, device
        Its number, and that of the device that it is on.
    layers
        The children that it has. The first stage also has all that runs before them, the last all behind.
    forwards
        The most forwards that wait for their backward at one time.
    forward_time, backward_time
        Of its plan, recomputation in them; of the last one with the loss.
    plain_time
        Of both, without recomputation and loss.
    extra_time
        What recomputation adds.
    memory_limit
        For ``wrap``: the stage's own step, with all forwards in flight.
    device_memory
        What the stage may take of its device, all in all.
    resident
        Parameters, buffers, optimizer state, inputs, and PyTorch's buffers for what is sent.
    predicted_peak
        The most that the stage takes of its device, all in all: at most ``device_memory``.
    inputs
        What it is called with.
    """

    index: int
    device: int
    layers: tuple[str, ...]
    forwards: int
    forward_time: int
    backward_time: int
    plain_time: int
    extra_time: int
    memory_limit: int
    device_memory: int
    resident: int
    predicted_peak: int
    inputs: tuple[StageInput, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Where a model is cut into the stages of a pipeline, and what each of them may take.

    It holds figures and names alone: ranks may send it to each other.

    Attributes
    ----------
    schedule, devices, stages_per_device, microbatches
        What it was made for.
    stages
        In the order of the model. Stage i is on device i mod ``devices``.
    step_time
        Nanoseconds of a step, by the cost model: from the start of the first forward to the end of the last
        backward, without the optimizer.
    bubble
        The part of all devices' time in which they wait.
    timeline
        Every action on its device's clock: device, start, end, stage, microbatch, kind.
    """

    schedule: ScheduleName
    devices: int
    stages_per_device: int
    microbatches: int
    stages: tuple[PlannedStage, ...]
    step_time: int
    bubble: float
    timeline: tuple[Span, ...] = field(repr=False)
    _wrap: Mapping[str, Any] = field(repr=False)
    _last: Mapping[str, Any] = field(repr=False)

    @property
    def split_spec(self) -> dict[str, SplitPoint]:
        """``split_spec`` of ``torch.distributed.pipelining.pipeline``."""
        from torch.distributed.pipelining import SplitPoint  # not where no pipeline is planned

        return {stage.layers[0]: SplitPoint.BEGINNING for stage in self.stages[1:]}

    def stages_of(self, device: int) -> tuple[PlannedStage, ...]:
        """The stages of a device, in the order of the model."""
        return tuple(each for each in self.stages if each.device == device)

    def wrap_kwargs(self, stage: int) -> dict[str, Any]:
        """Keywords of :func:`hybridremat.wrap` for the module of a stage.

        Raises
        ------
        LimitError
            If there is no such stage.
        """
        found = self._stage(stage)
        is_last = stage == len(self.stages) - 1
        return {
            **self._wrap,
            **(self._last if is_last else {"grad_outputs": "all"}),
            "memory_limit": found.memory_limit,
            "forwards": found.forwards,
            "hold_outputs": True,
            "across_ranks": False,
        }

    def args(self, stage: int, device: str | torch.device = "cpu") -> tuple[torch.Tensor, ...]:
        """Sample inputs of a stage, for :func:`hybridremat.wrap`: tensors of zeros.

        Raises
        ------
        LimitError
            If there is no such stage.
        """
        return tuple(each.made(torch.device(device)) for each in self._stage(stage).inputs)

    def _stage(self, stage: int) -> PlannedStage:
        if stage not in range(len(self.stages)):
            raise LimitError(f"stage {stage!r} is none of 0 … {len(self.stages) - 1}")
        return self.stages[stage]

    def __str__(self) -> str:
        return pipeline_text(self)

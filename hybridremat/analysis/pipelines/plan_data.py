"""The plan of a pipeline: its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridremat.analysis.pipelines.pieces import StageInput
from hybridremat.sequence.pipeline.orders import ScheduleName
from hybridremat.sequence.pipeline.replay import Span


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
class PipelineData:
    """The fields of :class:`hybridremat.PipelinePlan`, which explains them."""

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

"""The public :class:`PipelinePlan`: what to pass to PyTorch and to ``wrap``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridremat.analysis.pipelines.plan_data import PipelineData, PlannedStage
from hybridremat.analysis.pipelines.text import pipeline_text
from hybridremat.errors import LimitError

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint


@dataclass(frozen=True, kw_only=True)
class PipelinePlan(PipelineData):
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

    def plot(self, path: str | Path) -> None:
        """Draw the timeline as a Gantt chart, one row for each device: ``.png``, ``.svg`` or ``.pdf``.

        Raises
        ------
        PlotError
            If the file has another suffix.
        MissingPackageError
            If matplotlib is not installed.
        OutputError
            If it cannot be written.
        """
        from hybridremat.analysis.pipelines.gantt import plot_timeline

        plot_timeline(self, path)

    def _stage(self, stage: int) -> PlannedStage:
        if stage not in range(len(self.stages)):
            raise LimitError(f"stage {stage!r} is none of 0 … {len(self.stages) - 1}")
        return self.stages[stage]

    def __str__(self) -> str:
        return pipeline_text(self)

"""Plan a pipeline: the public function."""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise
from typing import Any, Unpack

import torch
from torch import nn

from hybridremat.analysis.pipelines.estimates import Estimates
from hybridremat.analysis.pipelines.layers import layers_of
from hybridremat.analysis.pipelines.loss import loss_costs, without_values
from hybridremat.analysis.pipelines.pieces import cut_in_pieces
from hybridremat.analysis.pipelines.plan import PipelinePlan
from hybridremat.analysis.pipelines.plan_data import PlannedStage
from hybridremat.analysis.pipelines.request import (
    LossFunction,
    PipelineRequest,
    device_bytes,
    pipeline_shape,
)
from hybridremat.analysis.pipelines.search import FoundPipeline, find_pipeline
from hybridremat.analysis.pipelines.stages import StagePlan, Stages
from hybridremat.compiler.model_checks import require_matching_inputs
from hybridremat.errors import LimitError
from hybridremat.interrupts import prompt_interrupts
from hybridremat.planning.progress import Progress, planning_progress
from hybridremat.planning.ranks import rendezvous
from hybridremat.planning.settings import PipelineSettings, Settings, settings_of
from hybridremat.runtime.prepare import with_memory
from hybridremat.units import is_count


@prompt_interrupts()
def pipeline_plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int,
    microbatches: int,
    device_memory: int | str | Sequence[int | str],
    schedule: str = "1f1b",
    stages_per_device: int | None = None,
    optimizer_slots: int = 2,
    link: float | None = None,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    layers: str | None = None,
    across_ranks: bool = True,
    progress: bool = True,
    **settings: Unpack[PipelineSettings],
) -> PipelinePlan:
    """Cut a model into the stages of a pipeline, each under the memory of its device.

    Where the model is cut and what each stage recomputes are chosen together, for the shortest step of
    ``torch.distributed.pipelining``'s schedule. The model does not change.

    Parameters
    ----------
    model, args, kwargs
        As of :func:`hybridremat.plan`; the inputs are those of **one microbatch**. The model has to be one
        that ``torch.export`` takes.
    stages
        How many devices there are; each has one stage, or ``stages_per_device``.
    microbatches
        How many microbatches a step has.
    device_memory
        Bytes, or a size (``"40GiB"``), that each device has for all of training; or one for each device.
        Parameters, gradients, optimizer state and buffers of the pipeline are counted in it. Several
        stages on one device have equal shares.
    schedule
        ``"1f1b"``, ``"gpipe"`` or ``"interleaved1f1b"``, as ``Schedule1F1B``, ``ScheduleGPipe`` and
        ``ScheduleInterleaved1F1B``.
    stages_per_device
        Of ``"interleaved1f1b"`` alone; None: 2.
    optimizer_slots
        Tensors that the optimizer keeps for each trained parameter, of its size: 2 for Adam, 0 for plain SGD.
    link
        Bytes in a second that go from one device to the next, each way. None: sending takes no time.
    loss_fn, target
        The loss of the schedule, called with the output of the last stage and a target, and what it takes for
        one microbatch. Its time and memory are the last stage's. None: the output is the loss, or its costs
        do not count.
    layers
        The ModuleList or Sequential between whose children the model is cut. None: the longest.
    across_ranks
        If a process group is up, whether its first rank plans and all others get its plan: all of them have
        to call this. Cuts that differ between ranks do not fit each other.
    progress
        Whether to show how far planning is, on the error stream.
    **settings
        As of :func:`hybridremat.plan`; ``wrap`` gets them from the plan.

    Raises
    ------
    LimitError
        If a number is out of range, ``device_memory`` is a share, or the schedule is none of these: those
        that split the backward of a stage are not.
    ModelError
        If the model has no ModuleList and no Sequential, or that has fewer children than there are stages.
    CaptureError
        If the model cannot be exported, or does not run these children once each, in their order.
    InfeasibleLimitError
        If no cuts are found with which every stage fits; it says which one does not, and what that needs.
    HybridRematError
        As :func:`hybridremat.plan`, of a stage. What one rank raises, all do.

    Examples
    --------
    >>> from torch import nn
    >>> tower = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    >>> found = hybridremat.pipeline_plan(
    ...     tower, (torch.zeros(4, 8),), stages=2, microbatches=4, device_memory="1MiB", cost_model="flops"
    ... )
    >>> [stage.layers for stage in found.stages]
    [('0', '1'), ('2', '3')]
    """
    asked = settings_of("pipeline_plan", PipelineSettings.__optional_keys__, settings)
    asked = asked.validated(need_limit=False)
    shape = pipeline_shape(schedule, stages, microbatches, stages_per_device)
    if not is_count(optimizer_slots, least=0):
        raise LimitError(
            f"optimizer_slots={optimizer_slots!r} is no number of tensors for each parameter: 2 for Adam, 0 "
            "for plain SGD"
        )
    if link is not None and not link > 0:
        raise LimitError(f"link={link!r} is no rate: give bytes in a second, 25e9 for one, or None")
    memory = device_bytes(device_memory, shape.devices)
    request = PipelineRequest(shape, memory, optimizer_slots, link, asked, loss_fn, target)
    with rendezvous(across_ranks, "pipeline_plan") as ranks:
        group = ranks.group("pipeline", "")

        def make() -> PipelinePlan:
            with planning_progress(show=progress, first="cutting the model in pieces") as show:
                return _made(model, args, kwargs or {}, request, layers, show)

        made = group.from_leader(make, _written, _read)
        ranks.finish(lambda: str(made))
    return made


def _written(plan: PipelinePlan) -> str:
    return b64encode(pickle.dumps(plan)).decode()


def _read(text: str) -> PipelinePlan:
    plan: PipelinePlan = pickle.loads(b64decode(text))  # noqa: S301 - from a rank of the same job
    return plan


def _made(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    request: PipelineRequest,
    container: str | None,
    progress: Progress,
) -> PipelinePlan:
    names = layers_of(model, container, request.shape.stages)
    model, args, kwargs = with_memory(model, args, kwargs, request.settings)
    require_matching_inputs(model, args, kwargs)
    with _in_training(model):
        pieces = cut_in_pieces(model, args, kwargs, names)
        last = pieces.outputs() if request.loss is not None else ()
        outputs = [without_values(tuple(each.shape), each.dtype, pieces.device) for each in last]
        loss = loss_costs(outputs, request)
        found = find_pipeline(Stages(Estimates(pieces, request, loss, progress)), names)
    return _plan(found, request, names, reserve=loss.peak)


def _plan(
    found: FoundPipeline, request: PipelineRequest, names: Sequence[str], *, reserve: int
) -> PipelinePlan:
    shape, waiting = request.shape, request.shape.in_flight()
    loss = {"reserve": reserve} if reserve else {}
    return PipelinePlan(
        schedule=shape.schedule,
        devices=shape.devices,
        stages_per_device=shape.per_device,
        microbatches=shape.microbatches,
        stages=tuple(
            _stage(index, plan, names[first:last], request, waiting[index])
            for index, (plan, (first, last)) in enumerate(zip(found.stages, pairwise(found.at), strict=True))
        ),
        step_time=found.step.time,
        bubble=found.step.bubble,
        timeline=found.step.spans,
        _wrap=_for_wrap(request.settings),
        _last=loss,
    )


def _stage(
    index: int, plan: StagePlan, layers: Sequence[str], request: PipelineRequest, forwards: int
) -> PlannedStage:
    return PlannedStage(
        index=index,
        device=index % request.shape.devices,
        layers=tuple(layers),
        forwards=forwards,
        forward_time=plan.times.forward,
        backward_time=plan.times.backward,
        plain_time=plan.plain,
        extra_time=plan.extra,
        memory_limit=plan.limit,
        device_memory=request.memory_of(index),
        resident=plan.resident,
        predicted_peak=plan.peak,
        inputs=plan.inputs,
    )


def _for_wrap(settings: Settings) -> dict[str, Any]:
    """The settings that were given, for ``wrap``."""
    given = {each.name: getattr(settings, each.name) for each in fields(settings)}
    known = {each.name: each.default for each in fields(settings)}
    keys = PipelineSettings.__optional_keys__ - {"device_spec"}
    return {name: given[name] for name in sorted(keys) if given[name] != known[name]}


@contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """A model is exported in the mode that it is in, and planned for training."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode

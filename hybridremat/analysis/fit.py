"""Will it fit, and at which limit: everything that training takes on a device, beside what the device has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Unpack, overload

from torch import nn

from hybridremat.analysis.batch_search import largest_batch
from hybridremat.analysis.batch_size import BatchSize
from hybridremat.analysis.batch_steps import Batches, BatchStep, Factory
from hybridremat.analysis.device_memory import device_memory, kept_free
from hybridremat.analysis.fit_devices import devices_asked
from hybridremat.analysis.fit_pipeline import PipelineFit
from hybridremat.analysis.fit_planned import planned
from hybridremat.analysis.fit_result import Fit
from hybridremat.analysis.fit_spread import Given, fit_on_devices
from hybridremat.analysis.needs import training_needs
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.errors import InfeasibleLimitError
from hybridremat.interrupts import prompt_interrupts
from hybridremat.planning.settings import BatchSettings, Settings, settings_of


class _Rest(BatchSettings, total=False):
    """Keywords of :func:`fit` that do not decide on what it returns."""

    optimizer: str
    memory: int | str | None
    margin: int | str | None
    make_batch: Factory | None
    most: int
    progress: bool
    gpus: int | None
    link: float | None
    microbatches: int | None


@overload
def fit(
    model: nn.Module,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    shard: None = ...,
    **rest: Unpack[_Rest],
) -> Fit: ...


@overload
def fit(
    model: nn.Module,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    shard: str | None,
    **rest: Unpack[_Rest],
) -> Fit | PipelineFit: ...


@prompt_interrupts()
def fit(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: str = "adamw",
    memory: int | str | None = None,
    margin: int | str | None = None,
    make_batch: Factory | None = None,
    most: int = 65536,
    progress: bool = True,
    gpus: int | None = None,
    shard: str | None = None,
    link: float | None = None,
    microbatches: int | None = None,
    **settings: Unpack[BatchSettings],
) -> Fit | PipelineFit:
    """Whether training a model fits a device, and the ``memory_limit`` to set. The model does not change.

    Parameters
    ----------
    model, args, kwargs
        As of :func:`hybridremat.plan`.
    optimizer
        A name of ``torch.optim`` in any case, or ``"module:Class"``, and after commas its arguments:
        ``"adamw"``, ``"sgd,momentum=0.9"``, ``"adamw,fused=True"``. It steps on tensors without values.
    memory
        Bytes, or a size, that the device has for this. None: of ``device_spec`` its memory; of a CUDA device
        what is free and what this process holds there; of a CPU the machine's memory.
    margin
        Bytes, or a size, to be kept free. None: on CUDA as :func:`hybridremat.auto_limit`, and with
        ``device_spec`` 512 MiB more, for CUDA's context; on CPU none.
    make_batch, most
        As ``model_factory`` and ``most`` of :func:`hybridremat.max_batch_size`; without a function the
        largest batch is not looked for. Not with ``gpus``.
    gpus, shard
        How many devices training is spread over, and how: ``"fsdp2"`` (``fully_shard`` of ``units``, by
        default the layers that are alike, and of the model), ``"tp"`` (the tensor parallel plan that a model
        from transformers brings), or ``"pp"`` (:func:`hybridremat.pipeline_plan` with as many stages).
        ``fsdp=Fsdp(8, …)`` says the first with the dtypes of FSDP2. The figures are those of one device: a
        :class:`hybridremat.ShardedFit`, or of a pipeline a :class:`hybridremat.PipelineFit`.
    link
        Bytes in a second that a device sends to the next one. None: NVLink's, where ``device_spec`` has it.
    microbatches
        Of ``"pp"``: how many a step has; the inputs are one of them. None: two for each device.
    **settings
        As of :func:`hybridremat.max_batch_size`.

    Raises
    ------
    OptionsError
        If there is no such optimizer, or its step reads values.
    LimitError
        If ``memory`` or ``margin`` cannot be read, or devices are named that make no sense.
    ModelError
        If a model has no layers that are alike, or no tensor parallel plan, and that was asked for.
    HybridRematError
        As :func:`hybridremat.plan`.

    Examples
    --------
    >>> found = hybridremat.fit(model, kwargs=batch, memory="1GiB", cost_model="flops", progress=False)
    >>> found.fits, found.resident + found.plain_step < found.memory
    ('plain', True)
    """
    asked = settings_of("fit", BatchSettings.__optional_keys__, settings)
    devices = devices_asked(gpus, shard, link, microbatches, asked.fsdp)
    made = SampleStep(model, args, {} if kwargs is None else kwargs)
    if devices is not None:
        given = Given(optimizer, memory, margin)
        return fit_on_devices(made, devices, asked, given, show=progress)
    asked = asked.validated(need_limit=False)
    early = asked.gradients == "in_backward"
    needs = training_needs(made, optimizer, asked.spec, early_gradients=early)
    name, available = device_memory(model, asked.spec, memory, needs.resident)
    kept = kept_free(model, asked.spec, margin, available - needs.resident)
    step = BatchStep.captured(made, asked, show=progress)
    plain = step.plain_need()
    found = Fit(
        **asdict(needs),
        device=name,
        memory=available,
        margin=kept,
        plain_step=plain,
        least_step=plain,
        reserve=asked.reserve_bytes(),
    )
    found = planned(found, step.frontier(reuse=False, show=progress), asked, step.context.origin)
    if make_batch is None:
        return found
    return replace(found, largest=_largest(found, make_batch, asked, most, show=progress))


def _largest(found: Fit, make_batch: Factory, asked: Settings, most: int, *, show: bool) -> BatchSize | None:
    """The largest batch for what is left to batch and step together; None if batch 1 does not fit."""
    left = found.room + found.batch
    if left < 1 or found.above(0) > found.room:
        return None
    batches = Batches(make_batch, replace(asked, memory_limit=left), show=show, with_inputs=True)
    try:
        return largest_batch(batches, start=1, most=most)
    except InfeasibleLimitError:
        return None


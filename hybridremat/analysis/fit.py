"""Will it fit, and at which limit: everything that training takes on a device, beside what the device has."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

import torch
from torch import nn

from hybridremat.analysis.batch_search import largest_batch
from hybridremat.analysis.batch_size import BatchSize
from hybridremat.analysis.batch_steps import Batches, BatchPath, BatchStep, Factory
from hybridremat.analysis.fit_data import FitData
from hybridremat.analysis.fit_text import fit_text
from hybridremat.analysis.needs import TrainingNeeds, training_needs
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.compiler.capture import model_device
from hybridremat.errors import InfeasibleLimitError, LimitError
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.interrupts import prompt_interrupts
from hybridremat.planning.planner import choose_from
from hybridremat.planning.settings import BatchSettings, Settings, settings_of
from hybridremat.runtime.auto_limit import LEAST_MARGIN, MARGIN_SHARE
from hybridremat.units import parse_bytes

CONTEXT = 512 << 20
"""Bytes that CUDA takes of a card for a process before its first tensor, some 300 to 600 MiB: our guess."""


@dataclass(frozen=True, kw_only=True)
class Fit(FitData):
    """What training takes on a device, and the limit to set; all but names in bytes.

    Attributes
    ----------
    optimizer
        As it was given.
    parameters, buffers, optimizer_state, batch
        What stays from step to step; tensors that share memory count once. ``resident`` is their sum.
    gradients
        Of all parameters that are trained: part of the step.
    optimizer_step
        The most that a step of the optimizer holds beside gradients and state.
    early_gradients
        Whether gradients leave in the backward (``gradients="in_backward"``).
    device, memory
        The device, and what it has for this process.
    margin
        Kept free for what the allocator and CUDA's libraries lose; 0 on CPU.
    plain_step, least_step
        Step memory without a plan and with the one of least memory; ``reserve`` and ``forwards`` included.
    reserve
        Of the step memory, what was asked to be kept for the caller's own code.
    memory_limit
        To be set: all that is left for the step. None if nothing fits.
    plan
        Of that limit. None if nothing fits, and where the plain step does.
    largest
        The largest batch, if a function that makes batches was given and batch 1 fits. Its limits and
        peaks include the bytes of the batch itself.
    """

    def __str__(self) -> str:
        return fit_text(self)


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
    **settings: Unpack[BatchSettings],
) -> Fit:
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
        largest batch is not looked for.
    **settings
        As of :func:`hybridremat.max_batch_size`.

    Raises
    ------
    OptionsError
        If there is no such optimizer, or its step reads values.
    LimitError
        If ``memory`` or ``margin`` cannot be read.
    HybridRematError
        As :func:`hybridremat.plan`.

    Examples
    --------
    >>> found = hybridremat.fit(model, kwargs=batch, memory="1GiB", cost_model="flops", progress=False)
    >>> found.fits, found.resident + found.plain_step < found.memory
    ('plain', True)
    """
    asked = settings_of("fit", BatchSettings.__optional_keys__, settings).validated(need_limit=False)
    made = SampleStep(model, args, {} if kwargs is None else kwargs)
    early = asked.gradients == "in_backward"
    needs = training_needs(made, optimizer, asked.spec, early_gradients=early)
    name, available = _device(model, asked.spec, memory, needs)
    kept = _margin(model, asked.spec, margin, available - needs.resident)
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
    found = _planned(found, step, asked, show=progress)
    if make_batch is None:
        return found
    return replace(found, largest=_largest(found, make_batch, asked, most, show=progress))


def _planned(found: Fit, step: BatchStep | BatchPath, asked: Settings, *, show: bool) -> Fit:
    """With the least step, the limit, and the plan for it."""
    settings = replace(asked, memory_limit=max(1, found.room))
    frontier = step.frontier(reuse=False, show=show)
    try:
        plan = choose_from(frontier, settings, step.context.origin)
    except InfeasibleLimitError as error:
        return replace(found, least_step=error.least)
    found = replace(found, least_step=min(plan.least_peak, found.plain_step))
    if found.gradients + found.optimizer_step > found.room and not found.early_gradients:
        return found  # no plan makes the optimizer's own step smaller
    return replace(found, memory_limit=found.room, plan=plan if found.plain_step > found.room else None)


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


def _device(
    model: nn.Module, spec: DeviceSpec | None, memory: int | str | None, needs: TrainingNeeds
) -> tuple[str, int]:
    """The device's name, and the bytes that it has for this."""
    name = model_device(model) if spec is None else spec.name
    if memory is not None:
        available = parse_bytes(memory, name="memory")
        if available < 1:
            raise LimitError(f"memory={memory!r} is nothing: give what the device has, in bytes or \"6GiB\"")
        return name, available
    if spec is not None:
        return name, spec.memory
    if name == "cuda":
        device = next(model.parameters()).device
        held = torch.cuda.memory_reserved(device)
        others = max(0, torch.cuda.memory_allocated(device) - needs.resident)
        return str(device), torch.cuda.mem_get_info(device)[0] + held - others
    return name, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _margin(model: nn.Module, spec: DeviceSpec | None, margin: int | str | None, left: int) -> int:
    if margin is not None:
        return parse_bytes(margin, name="margin")
    if spec is None and model_device(model) != "cuda":
        return 0
    kept = max(int(MARGIN_SHARE * max(0, left)), LEAST_MARGIN)
    return kept if spec is None else kept + CONTEXT

"""Measure a training step: peak memory to the byte, time, and what the caller's own code takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridremat.compiler.capture import model_device, training_mode
from hybridremat.compiler.model_state import untouched
from hybridremat.errors import InputError
from hybridremat.graph.costs.allocations import Trace, record_allocations, span
from hybridremat.graph.private_torch import tree_leaves
from hybridremat.units import format_bytes

LossFunction = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Measurement:
    """One training step (forward, loss, backward), measured.

    Attributes
    ----------
    peak
        Bytes above resident memory, the caller's loss code included.
    outside
        Most bytes that code outside the model allocated between forward and backward: what ``reserve``
        has to cover. 0 if the loss is inside the model.
    saved
        Bytes alive when the model's forward has returned.
    seconds
        Wall time of the step, measured without recording.
    predicted
        The plan's predicted peak in bytes, without ``reserve``; None for a model that is not wrapped.
    """

    peak: int
    outside: int
    saved: int
    seconds: float
    predicted: int | None

    def __str__(self) -> str:
        text = f"peak {format_bytes(self.peak)}, saved {format_bytes(self.saved)}, {self.seconds:.3f} s"
        if self.outside:
            text += f", outside the model {format_bytes(self.outside)}"
        if self.predicted is not None:
            text += f"; predicted {format_bytes(self.predicted)}"
        return text


def loss_of(output: object) -> Tensor:
    """The loss in a model's output: a scalar tensor, ``.loss``, ``["loss"]``, or the first of a tuple.

    Raises
    ------
    InputError
        If there is none.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    if isinstance(found, Tensor) and found.dim() == 0:
        return found
    raise InputError(
        f"no scalar loss in the model's output ({type(output).__name__}); pass loss_fn=, a function "
        "from the output "
        "to the loss"
    )


def measure(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    repeats: int = 3,
) -> Measurement:
    """Run training steps on sample inputs and measure them.

    Gradients, buffers, random state and the optimizer are left as they were; parameters do not change, and
    their hooks (an optimizer that steps in the backward) do not run.

    Parameters
    ----------
    model
        A wrapped or a plain model.
    loss_fn
        From the model's output to the loss. By default the loss is looked for in the output
        (:func:`loss_of`). The output is dropped once the loss is there.
    repeats
        Timed steps; the least is reported. One further step is run for memory.

    Raises
    ------
    InputError
        If the output holds no loss and no ``loss_fn`` is given.
    """
    find_loss = loss_fn or loss_of
    keywords = dict(kwargs or {})

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with span("model"):
            output = model(*args, **keywords)
        _mark_arrival(output)
        with span("outside"):
            loss = find_loss(output)
            del output
        loss.backward()

    with untouched(model), torch.enable_grad(), training_mode(model):
        step()  # the first call may compile
        seconds = min(_timed(step, model) for _ in range(max(1, repeats)))
        figures = _cuda_figures(step, model) if model_device(model) == "cuda" else _cpu_figures(step, model)
    return Measurement(*figures, seconds=seconds, predicted=_predicted(model))


def _mark_arrival(output: object) -> None:
    """Record when the first gradient reaches the model's output: there the model's backward starts."""
    arrived: list[bool] = []

    def mark(_: Tensor) -> None:
        if not arrived:
            arrived.append(True)
            with span("arrival"):
                pass

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(mark)


def _predicted(model: nn.Module) -> int | None:
    from hybridremat.runtime.planned_call import planned_call

    call = planned_call(model)
    plan = call.plan if call is not None else None
    return plan.predicted_peak if plan is not None else None


def _synchronize(model: nn.Module) -> None:
    if model_device(model) == "cuda":
        torch.cuda.synchronize()


def _timed(step: Callable[[], None], model: nn.Module) -> float:
    _synchronize(model)
    started = time.perf_counter()
    step()
    _synchronize(model)
    return time.perf_counter() - started


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()


def _cpu_figures(step: Callable[[], None], model: nn.Module) -> tuple[int, int, int]:
    _clear(model)
    collecting = gc.isenabled()
    gc.disable()
    try:
        trace = record_allocations(step)
    finally:
        if collecting:
            gc.enable()
    return _figures(trace)


def _figures(trace: Trace) -> tuple[int, int, int]:
    """Peak; peak outside the model above what its forward left; what its forward left."""
    forward_end = trace.spans["model"][1]
    backward_start = trace.spans["arrival" if "arrival" in trace.spans else "outside"][1]
    level = highest = saved = outside = 0
    for when, size in trace.events:
        level += size
        highest = max(highest, level)
        if when <= forward_end:
            saved = level
        elif when <= backward_start:
            outside = max(outside, level - saved)
    return highest, outside, saved


def _cuda_figures(step: Callable[[], None], model: nn.Module) -> tuple[int, int, int]:
    """On CUDA only the peak of the step is known; the allocator has no marks in time."""
    _clear(model)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, 0, 0

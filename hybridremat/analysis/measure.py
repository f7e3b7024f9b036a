"""Measure a training step: peak memory to the byte, time, and what the caller's own code takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridremat.compiler.capture import model_device, training_mode
from hybridremat.compiler.model_state import preserve_state
from hybridremat.errors import InputError
from hybridremat.graph.costs.allocations import record
from hybridremat.graph.costs.recorder import Mark, Recording
from hybridremat.graph.garbage import without_collection
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
    keywords = dict({} if kwargs is None else kwargs)

    def step(mark: Mark) -> None:
        _drop_gradients(model)
        mark("model")
        output = model(*args, **keywords)
        mark("loss")
        _mark_arrival(output, mark)
        loss = find_loss(output)
        del output
        mark("backward of the loss")
        loss.backward()

    with preserve_state(model), torch.enable_grad(), training_mode(model):
        step(_unmarked)  # the first call may compile
        seconds = min(_timed(step, model) for _ in range(max(1, repeats)))
        _drop_gradients(model)
        with without_collection():
            recording = record(model_device(model), step)
    return Measurement(*_figures(recording), seconds=seconds, predicted=_predicted(model))


def _unmarked(_: str) -> None:
    pass


def _mark_arrival(output: object, mark: Mark) -> None:
    """Mark when the first gradient reaches the model's output: there the model's backward starts."""
    arrived: list[bool] = []

    def arrive(_: Tensor) -> None:
        if not arrived:
            arrived.append(True)
            mark("backward of the model")

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(arrive)


def _predicted(model: nn.Module) -> int | None:
    from hybridremat.runtime.planned_call import planned_call

    call = planned_call(model)
    plan = call.plan if call is not None else None
    return plan.predicted_peak if plan is not None else None


def _synchronize(model: nn.Module) -> None:
    if model_device(model) == "cuda":
        torch.cuda.synchronize()


def _timed(step: Callable[[Mark], None], model: nn.Module) -> float:
    _synchronize(model)
    started = time.perf_counter()
    step(_unmarked)
    _synchronize(model)
    return time.perf_counter() - started


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _figures(recording: Recording) -> tuple[int, int, int]:
    """Peak; peak outside the model above what its forward left; what its forward left."""
    segments = recording.named()
    saved = segments["model"].end
    outside = [segments["loss"]]
    if "backward of the model" in segments:  # else no gradient reaches the output
        outside.append(segments["backward of the loss"])
    return recording.peak, max(segment.peak for segment in outside) - saved, saved

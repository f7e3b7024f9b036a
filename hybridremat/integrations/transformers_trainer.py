"""A callback that makes Hugging Face's Trainer train under a memory limit."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Unpack

from torch import nn

from hybridremat.errors import MissingPackageError, ModelError
from hybridremat.integrations.loop import LoopWatch
from hybridremat.integrations.loop_options import WrapOptions, loop_options
from hybridremat.integrations.loop_report import Uploads
from hybridremat.integrations.optimizer_in_backward import require_steps_in_backward
from hybridremat.planning.plan import Plan

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise MissingPackageError(
        "HybridRematTrainerCallback needs transformers and accelerate, and they cannot be imported "
        f"({error}); pip install 'transformers[torch]>=4.57'"
    ) from error


class HybridRematTrainerCallback(TrainerCallback):  # type: ignore[misc]  # transformers is read as Any
    """Wraps the Trainer's model when training begins, logs what was measured, unwraps it at the end.

    The plan is made in the first training step for exactly what the loop passes, and one more for each
    further input shape. With DistributedDataParallel the module inside is wrapped, and each rank plans for
    itself. A model that is wrapped already (all of it, or one part) stays so, and is only watched.

    Parameters
    ----------
    module
        Name of the submodule to be wrapped; None: the model.
    measure_every
        Steps between measurements. By default every step on CUDA, where the caching allocator counts
        anyway (its peak is reset each time), and one on CPU, the second planned one, where measuring takes
        the profiler. A step is a micro-batch here: a forward and its backward.
    plain_steps
        How many optimizer steps first run plain and are timed, so that ``measured_overhead`` can be logged.
        The limit does not hold in them.
    tolerance
        By which fraction a measured peak may leave the prediction without a warning.
    report
        Whether the HTML report and the frontier's picture are written at the end, to ``hybridremat/`` in
        ``output_dir``, and handed to TensorBoard and Weights & Biases.
    tune_steps
        In how many steps, after the second planned one, schedules near the plan's take turns, so that the
        fastest one stays (:func:`hybridremat.tune`). None: the plan's runs.
    wrap_options
        ``memory_limit``, ``max_overhead``, ``reserve`` and the other keyword arguments of
        :func:`hybridremat.wrap`, except sample inputs and ``across_ranks``.

    Attributes
    ----------
    plans
        The plans that ran, one for each input shape; they stay after training.

    Raises
    ------
    LimitError, CostModelError, OptionsError
        For an option that cannot be used.
    MissingPackageError
        When the name is first used, without transformers.

    Notes
    -----
    From the first planned step on, the Trainer's own log entries have ``hybridremat/predicted_peak_bytes``
    and ``hybridremat/predicted_overhead`` (a fraction). Those after a measurement have
    ``hybridremat/measured_peak_bytes`` too (the largest since the last entry, beside the prediction of that
    step), and those after ``plain_steps`` ``hybridremat/measured_overhead``. ``plain_peak_bytes``,
    ``limit_bytes``, ``plans``, ``planning_seconds``, and MiB beside all bytes (``…_mib``) are there, too. A
    peak that leaves the prediction is a :class:`~hybridremat.PredictionWarning`, once. Training ends with one
    line in the log.

    Transformers tells its callbacks nothing when training fails. ``with callback: trainer.train()`` unwraps
    the model in any case, and so does :meth:`close`; a new ``train()`` starts afresh in any case.

    Examples
    --------
    >>> from hybridremat import HybridRematTrainerCallback
    >>> callback = HybridRematTrainerCallback(memory_limit="60%")

    ``Trainer(…, callbacks=[callback])`` wraps its model and plans it in the first training step.
    """

    def __init__(
        self,
        *,
        module: str | None = None,
        measure_every: int | None = None,
        plain_steps: int = 0,
        tolerance: float = 0.03,
        report: bool = True,
        tune_steps: int | None = None,
        **wrap_options: Unpack[WrapOptions],
    ) -> None:
        options = loop_options(
            wrap_options,
            module=module,
            measure_every=measure_every,
            plain_steps=plain_steps,
            tolerance=tolerance,
            report=report,
            tune_steps=tune_steps,
        )
        self._watch = LoopWatch(options)
        self._others: Sequence[TrainerCallback] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that ran in the last training, one for each input shape."""
        return self._watch.log.plans

    def __enter__(self) -> HybridRematTrainerCallback:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unwrap the model and stop measuring. May be called at any time."""
        self._watch.end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check and wrap the model.

        Raises
        ------
        HybridRematError
            If the model cannot be wrapped; no step has run.
        """
        _require_one_device(args.n_gpu)
        require_steps_in_backward(
            kwargs.get("optimizer"),
            clips=bool(args.max_grad_norm),
            accumulates=args.gradient_accumulation_steps > 1,
            scales=args.fp16,
        )
        frame = inspect.currentframe()
        self._others = _move_to_front(self, frame)
        model: nn.Module = kwargs["model"]
        self._watch.begin(model, loss_outside=_computes_loss(_trainer(args, frame)))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-batch of an optimizer step begins."""
        self._watch.step_begins()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch is over, and another one of its optimizer step follows."""
        self._watch.backward_ends()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last micro-batch of an optimizer step is over, and gradients are clipped."""
        self._watch.backward_ends()
        self._watch.step_ends()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Add the figures to an entry of training, and to the copy that the history already has."""
        if logs is None or not ("loss" in logs or "train_loss" in logs):
            return
        entry = self._watch.log.entry()
        logs.update(entry)
        if state.log_history:
            state.log_history[-1].update(entry)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what it came to, hand over the report, and unwrap the model."""
        if state.is_world_process_zero:
            self._watch.finish(Path(args.output_dir), upload_to=_uploads(self._others, state.global_step))
        self._others = ()
        self.close()


def _require_one_device(count: int) -> None:
    """Refuse nn.DataParallel, which the Trainer takes by itself where one process sees several GPUs."""
    if count > 1:
        raise ModelError(
            f"the Trainer spreads each batch over {count} GPUs of this process with nn.DataParallel, which "
            "copies the model in each step; such steps are not planned. Launch one process for each GPU "
            "(torchrun --nproc-per-node=…), or let this one see a single GPU (CUDA_VISIBLE_DEVICES=0)."
        )


def _trainer(args: Any, frame: FrameType | None) -> Trainer | None:
    """The Trainer of these arguments, which calls; None if it is not among the callers."""
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and found.args is args:
            return found
        frame = frame.f_back
    return None


def _computes_loss(trainer: Trainer | None) -> bool:
    """Whether a Trainer may compute its loss from the model's outputs, in place of taking the model's own."""
    if trainer is None:
        return True
    own = getattr(trainer.compute_loss, "__func__", None) is not Trainer.compute_loss
    return own or trainer.compute_loss_func is not None or trainer.label_smoother is not None


def _uploads(callbacks: Sequence[TrainerCallback], step: int) -> Uploads:
    """The writers and runs of transformers' own callbacks for TensorBoard and Weights & Biases."""
    writers = [getattr(callback, "tb_writer", None) for callback in callbacks]
    runs = [getattr(getattr(callback, "_wandb", None), "run", None) for callback in callbacks]
    return Uploads(tuple(filter(None, writers)), tuple(filter(None, runs)), step)


def _move_to_front(callback: TrainerCallback, frame: FrameType | None) -> Sequence[TrainerCallback]:
    """Move a callback to the front, so that all others see what it adds to a log entry; returns all of them.

    The Trainer puts the callbacks of ``report_to`` before its user's, and a callback has no reference to its
    handler, so it is looked for among the callers. Where it is not found, only later callbacks see the
    figures.
    """
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            # The handler is iterating over this list: those before have been called, and move by one.
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)
            return list(handler.callbacks)
        frame = frame.f_back
    return ()

"""A callback that makes Lightning's Trainer train under a memory limit."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack

from hybridremat.errors import MissingPackageError, ModelError
from hybridremat.integrations.loop import LoopWatch
from hybridremat.integrations.loop_options import WrapOptions, loop_options
from hybridremat.integrations.loop_report import Uploads
from hybridremat.integrations.optimizer_in_backward import require_steps_in_backward
from hybridremat.planning.plan import Plan

PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # one code base under two names, with separate classes


def _callback_classes() -> tuple[Any, ...]:
    """The Callback of each package that is imported; if none is, that of the first one installed."""
    loaded = [sys.modules[name] for name in PACKAGES if sys.modules.get(name) is not None]
    if loaded:
        return tuple(package.Callback for package in loaded)
    failures = []
    for name in PACKAGES:
        try:
            return (import_module(name).Callback,)
        except ImportError as error:
            failures.append(str(error))
    raise MissingPackageError(
        f"HybridRematLightningCallback needs Lightning, and it cannot be imported ({'; '.join(failures)}); "
        "pip install lightning, or pip install pytorch-lightning"
    )


class HybridRematLightningCallback(*_callback_classes()):  # type: ignore[misc]  # chosen when it is imported
    """Wraps a module when training begins, logs what was measured, unwraps it at the end or on an exception.

    The plan is made in the first training step for exactly what the loop passes, and one more for each
    further input shape. A module that is wrapped already stays so, and is only watched. With
    DistributedDataParallel a submodule has to be named, and each rank plans for itself.

    Parameters
    ----------
    module
        Name of the submodule to be wrapped. None: the LightningModule itself, whose ``training_step`` then
        has to call ``self(…)``; what it does beside that is outside of the plan.
    measure_every
        Batches between measurements. By default every batch on CUDA, where the caching allocator counts
        anyway (its peak is reset each time), and one on CPU, the second planned one, where measuring takes
        the profiler.
    plain_steps
        How many batches first run plain and are timed, so that ``measured_overhead`` can be logged. The limit
        does not hold in them.
    tolerance
        By which fraction a measured peak may leave the prediction without a warning.
    report
        Whether the HTML report and the frontier's picture are written at the end, to ``hybridremat/`` in the
        folder of the Trainer's logger, or else in ``default_root_dir``, and handed to TensorBoard and Weights
        & Biases.
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
        When the name is first used, without Lightning.

    Notes
    -----
    ``hybridremat/predicted_peak_bytes``, ``hybridremat/predicted_overhead`` (a fraction), and once there are
    any ``hybridremat/measured_peak_bytes`` and ``hybridremat/measured_overhead`` go to all loggers of the
    Trainer and to its ``callback_metrics``: after the first planned batch, after each measurement (on CUDA at
    ``log_every_n_steps``, the largest since the last time) and when as many planned batches as plain ones
    have been timed. A peak that leaves the prediction is a :class:`~hybridremat.PredictionWarning`, once.

    ``plain_peak_bytes``, ``limit_bytes``, ``plans``, ``planning_seconds``, and MiB beside all bytes
    (``…_mib``) are there, too. Training ends with one line in the log.

    Examples
    --------
    >>> from hybridremat import HybridRematLightningCallback
    >>> callback = HybridRematLightningCallback(module="body", memory_limit="60%")

    ``Trainer(callbacks=[callback])`` wraps ``pl_module.body`` and plans it in the first training step.
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
        super().__init__()
        self._watch = LoopWatch(options)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that ran in the last training, one for each input shape."""
        return self._watch.log.plans

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check and wrap the module.

        Raises
        ------
        HybridRematError
            If it cannot be wrapped; no step has run, and nothing has changed.
        """
        for optimizer in trainer.optimizers:
            require_steps_in_backward(
                optimizer,
                clips=bool(trainer.gradient_clip_val),
                accumulates=trainer.accumulate_grad_batches > 1,
                scales=getattr(trainer.precision_plugin, "scaler", None) is not None,
            )
        self._watch.begin(pl_module)
        whole = self._watch.target is pl_module
        if whole and trainer.model is not pl_module:
            self._watch.end()
            children = ", ".join(name for name, _ in pl_module.named_children())
            raise ModelError(
                f"{type(trainer.model).__name__} calls training_step through the LightningModule's own call, "
                "which can therefore not be planned here. Name the submodule that training_step calls with "
                f"module=; there are {children}."
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch begins."""
        self._watch.step_begins()

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Lightning frees gradients of the step before between forward and backward: do not count them."""
        self._watch.pause()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """The gradients of the step before are freed."""
        self._watch.resume()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """A backward is over; with manual optimization there may be several in a batch."""
        self._watch.backward_ends()
        self._watch.step_ends()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log new figures."""
        log = self._watch.log
        regular = trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0
        if not log.due and not (log.waiting and regular):
            return
        entry = log.entry()
        _to_loggers(trainer, entry)
        if not trainer.barebones:
            pl_module.log_dict(entry, on_step=True, on_epoch=False, logger=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the last figures, say what it came to, hand over the report, and unwrap the module."""
        if self._watch.log.waiting:
            _to_loggers(trainer, self._watch.log.entry())
        folder = None
        if not (trainer.barebones or trainer.fast_dev_run):
            folder = Path(trainer.log_dir or trainer.default_root_dir)  # asked on all ranks: it is broadcast
        if trainer.is_global_zero:
            self._watch.finish(folder, upload_to=_uploads(trainer))
        self._watch.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Unwrap the module: training has failed or was interrupted."""
        self._watch.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Unwrap the module, if nothing else did."""
        if stage == "fit":
            self._watch.end()


def _to_loggers(trainer: Any, entry: dict[str, float]) -> None:
    """Log at once, whatever ``log_every_n_steps``: ``log_dict`` would drop the steps between."""
    for logger in trainer.loggers:
        logger.log_metrics(entry, step=trainer.global_step)


def _uploads(trainer: Any) -> Uploads:
    """The writers of TensorBoard's loggers, and the runs of Weights & Biases'."""
    found: dict[str, list[Any]] = {"TensorBoardLogger": [], "WandbLogger": []}
    for logger in trainer.loggers:
        for kind in type(logger).__mro__:
            if kind.__name__ in found:
                found[kind.__name__].append(logger.experiment)
                break
    return Uploads(tuple(found["TensorBoardLogger"]), tuple(found["WandbLogger"]), trainer.global_step)

"""Typed errors and warnings: each says what was asked, what is possible and what to do."""

from __future__ import annotations

import sys
import warnings


class HybridRematError(Exception):
    """Base of every error that hybridremat raises on purpose."""


class LimitError(HybridRematError, ValueError):
    """A memory limit, overhead or reserve that cannot be read or makes no sense."""


class PolicyError(HybridRematError, ValueError):
    """A policy that cannot be read, matches nothing, contradicts itself, or cannot be followed."""


class CostModelError(HybridRematError, ValueError):
    """An unknown cost model."""


class OptionsError(HybridRematError, ValueError):
    """An unknown or unusable option of the torch.compile backend or of a training loop's callback."""


class TargetError(HybridRematError, ValueError):
    """The target of the command line does not exist, or does not return a model and its inputs."""


class PlotError(HybridRematError, ValueError):
    """A picture or trace cannot be made: no known suffix of a file, or a step that is no one sequence."""


class UsageError(HybridRematError, ValueError):
    """Arguments of the command line that cannot be understood. ``usage`` is the usage as text."""

    def __init__(self, message: str, *, usage: str = "") -> None:
        super().__init__(message)
        self.usage = usage


class OutputError(HybridRematError, OSError):
    """A file cannot be written at the path that was given; nothing is left there."""


class DeviceSpecError(HybridRematError, ValueError):
    """A device to plan for that is unknown, or whose file cannot be read."""


class InfeasibleLimitError(HybridRematError, RuntimeError):
    """No plan fits the limit. ``limit`` and ``least`` are bytes; ``least`` is the least feasible limit.

    Batch-size finders (accelerate, transformers, Lightning) go on with a smaller batch, as they do where
    memory runs out: they look for that in the argument of a RuntimeError.
    """

    def __init__(self, message: str, *, limit: int, least: int) -> None:
        super().__init__(f"{message} For batch-size finders this is CUDA out of memory.")
        self._message = message
        self.limit = limit
        self.least = least

    def __str__(self) -> str:
        return self._message

    def fresh(self) -> InfeasibleLimitError:
        """The same, to be kept or raised: one that was raised holds all that its calls held."""
        return InfeasibleLimitError(str(self), limit=self.limit, least=self.least)


class DagError(HybridRematError, ValueError):
    """A graph of ops that cannot be run: a cycle, an edge of no op, figures that are no whole numbers."""


class GraphSizeError(HybridRematError, ValueError):
    """The joint graph is too large for a strategy that looks at the whole of it at once."""


class CaptureError(HybridRematError):
    """The model's joint graph could not be captured: a graph break, or a model that cannot be traced.

    ``place``: where and why the graph breaks, as the rest of a sentence; empty if that is not known.
    ``units``: patterns for submodules that can be captured one by one, if these are known.
    """

    def __init__(self, message: str, *, place: str = "", units: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.place, self.units = place, units


class GeneratedCodeError(HybridRematError):
    """What Inductor generates of the step has lines whose memory is not known to hybridremat."""


class OffloadError(HybridRematError, OSError):
    """Values cannot wait where ``offload=`` says, or could not be copied there or back."""


class ModelError(HybridRematError, ValueError):
    """The model has nothing to plan for (no trainable parameters), or is already wrapped, or not wrapped.

    Or it is not on the current CUDA device.
    """


class InputError(HybridRematError, TypeError):
    """The sample inputs do not fit the model."""


class PlanError(HybridRematError):
    """An emitted plan was refused by the checker, or does not belong to this graph. It was not run."""


class PlanMismatchError(PlanError):
    """A plan made for another model, input or set of outputs."""


class PlanFormatError(PlanError):
    """A plan file that is damaged, or has a schema version that is not read."""


class MeasurementError(HybridRematError, RuntimeError):
    """No memory was left to measure a kernel on its own."""


class UntriedKernelError(HybridRematError, RuntimeError):
    """A kernel takes no inputs that can be made up, so that its workspace is not known, and no limit kept."""


class EarlyGradientError(HybridRematError, RuntimeError):
    """What needs all gradients of a step at once, or none of them early, met gradients that leave early."""


class DoubleBackwardError(HybridRematError, RuntimeError):
    """A backward with ``create_graph=True`` reached a planned step. Nothing of the planned backward ran.

    Or one with ``retain_graph=True`` a step with ``compiler="inductor"``, or a second one the same graph.
    """


class ProfilerActiveError(HybridRematError, RuntimeError):
    """Memory cannot be measured while a profiler of the caller is running."""


class MissingPackageError(HybridRematError, ImportError):
    """An optional package that this feature needs is not installed."""


class RankError(HybridRematError):
    """Ranks that wrap together could not exchange plans, or another rank failed with a foreign error."""


class TuningError(HybridRematError, ValueError):
    """Schedules of this step cannot take turns, or not in so few steps, or they do so already."""


class GraphBreakWarning(UserWarning):
    """A step is several graphs, which are planned together; nobody said what to do then."""


class HeldOutputWarning(UserWarning):
    """The caller still holds an output during the backward that the plan assumed to be gone."""


class KeptGradientWarning(UserWarning):
    """Gradients that the plan takes to be used and dropped in the backward stay in ``.grad``."""


class OutstandingForwardWarning(UserWarning):
    """More forwards are waiting for their backward than the plan was made for."""


class UnsurveyedPathWarning(UserWarning):
    """In a step of several graphs, code between them ran on a path, or so often, that it was not measured."""


class InfeasibleLimitWarning(UserWarning):
    """No plan fits the limit; the plan of least memory runs, as ``on_infeasible="least"`` asks."""


class PredictionWarning(UserWarning):
    """A step of a training loop did not take the memory that its plan predicts, or ran without a plan."""


class DeviceMemoryWarning(UserWarning):
    """The memory limit is more than the device that is planned for has."""


_INNER = "hybridremat", "torch", "contextlib", "functools"


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn at the line of the caller's code: the innermost one that is neither hybridremat's nor torch's.

    Code that torch generates has no name. In a thread of the engine there is no code of the caller's.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "torch").partition(".")[0] in _INNER:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)

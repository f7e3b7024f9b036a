"""Rematerialization plans for PyTorch training steps.

``import hybridremat`` is light: torch, the solver and the plotting load when a name that needs them is
first used (PEP 562).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from hybridremat.errors import (
    CaptureError,
    CostModelError,
    DeviceMemoryWarning,
    DeviceSpecError,
    DoubleBackwardError,
    HeldOutputWarning,
    HybridRematError,
    InfeasibleLimitError,
    InfeasibleLimitWarning,
    InputError,
    LimitError,
    MeasurementError,
    MissingPackageError,
    ModelError,
    OptionsError,
    OutputError,
    OutstandingForwardWarning,
    PlanError,
    PlanFormatError,
    PlanMismatchError,
    PlotError,
    PolicyError,
    PredictionWarning,
    ProfilerActiveError,
    RankError,
    TargetError,
    UnsurveyedPathWarning,
    UsageError,
)

if TYPE_CHECKING:
    from hybridremat.api import frontier, get_plan, plan, prepare, unwrap, wrap
    from hybridremat.batch_search import max_batch_size
    from hybridremat.batch_size import BatchSize
    from hybridremat.curve import Frontier
    from hybridremat.device_limit import AutoLimit, auto_limit
    from hybridremat.graph.device_specs import DeviceSpec
    from hybridremat.lightning_callback import HybridRematLightningCallback as HybridRematLightningCallback
    from hybridremat.measured_point import MeasuredPoint
    from hybridremat.measurement import Measurement, measure
    from hybridremat.plans import Plan
    from hybridremat.trainer_callback import HybridRematTrainerCallback as HybridRematTrainerCallback

__version__ = "0.1.0"

__all__ = [
    "AutoLimit",
    "BatchSize",
    "CaptureError",
    "CostModelError",
    "DeviceMemoryWarning",
    "DeviceSpec",
    "DeviceSpecError",
    "DoubleBackwardError",
    "Frontier",
    "HeldOutputWarning",
    "HybridRematError",
    "InfeasibleLimitError",
    "InfeasibleLimitWarning",
    "InputError",
    "LimitError",
    "MeasuredPoint",
    "Measurement",
    "MeasurementError",
    "MissingPackageError",
    "ModelError",
    "OptionsError",
    "OutputError",
    "OutstandingForwardWarning",
    "Plan",
    "PlanError",
    "PlanFormatError",
    "PlanMismatchError",
    "PlotError",
    "PolicyError",
    "PredictionWarning",
    "ProfilerActiveError",
    "RankError",
    "TargetError",
    "UnsurveyedPathWarning",
    "UsageError",
    "auto_limit",
    "frontier",
    "get_plan",
    "max_batch_size",
    "measure",
    "plan",
    "prepare",
    "unwrap",
    "wrap",
]

# Public name → the module that defines it.
_HOME = {
    "wrap": "hybridremat.api",
    "unwrap": "hybridremat.api",
    "plan": "hybridremat.api",
    "get_plan": "hybridremat.api",
    "prepare": "hybridremat.api",
    "frontier": "hybridremat.api",
    "Plan": "hybridremat.plans",
    "Frontier": "hybridremat.curve",
    "DeviceSpec": "hybridremat.graph.device_specs",
    "measure": "hybridremat.measurement",
    "MeasuredPoint": "hybridremat.measured_point",
    "max_batch_size": "hybridremat.batch_search",
    "AutoLimit": "hybridremat.device_limit",
    "auto_limit": "hybridremat.device_limit",
    "BatchSize": "hybridremat.batch_size",
    "Measurement": "hybridremat.measurement",
    # Not in __all__ nor in dir(): these need packages that may not be there, and must not be read unasked.
    "HybridRematTrainerCallback": "hybridremat.trainer_callback",
    "HybridRematLightningCallback": "hybridremat.lightning_callback",
}


class _Face(ModuleType):
    """The class of the package itself: a public name loads its home when it is first read."""

    def __getattr__(self, name: str) -> object:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'hybridremat' has no attribute {name!r}")
        value: object = getattr(import_module(home), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Face

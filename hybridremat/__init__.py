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
    DagError,
    DeviceMemoryWarning,
    DeviceSpecError,
    DoubleBackwardError,
    EarlyGradientError,
    GeneratedCodeError,
    GraphBreakWarning,
    GraphSizeError,
    HeldOutputWarning,
    HybridRematError,
    InfeasibleLimitError,
    InfeasibleLimitWarning,
    InputError,
    KeptGradientWarning,
    LimitError,
    MeasurementError,
    MissingPackageError,
    ModelError,
    OffloadError,
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
    TuningError,
    UnsurveyedPathWarning,
    UntriedKernelError,
    UsageError,
)
from hybridremat.interrupts import prompt_interrupts
from hybridremat.version import __version__ as __version__

if TYPE_CHECKING:
    from hybridremat.analysis.batch_search import max_batch_size
    from hybridremat.analysis.batch_size import BatchSize
    from hybridremat.analysis.fit import fit
    from hybridremat.analysis.fit_pipeline import PipelineFit
    from hybridremat.analysis.fit_result import Fit
    from hybridremat.analysis.fit_sharded import ShardedFit
    from hybridremat.analysis.frontier import Frontier
    from hybridremat.analysis.frontier_data import MeasuredPoint
    from hybridremat.analysis.measure import Measurement, measure
    from hybridremat.analysis.pipelines.plan import PipelinePlan
    from hybridremat.analysis.pipelines.plan_data import PlannedStage
    from hybridremat.analysis.pipelines.planning import pipeline_plan
    from hybridremat.api import frontier, get_plan, plan, prepare, unwrap, wrap
    from hybridremat.compiler.opaque_calls import opaque
    from hybridremat.dags import DagPlan, plan_dag
    from hybridremat.graph.costs.device_specs import DeviceSpec
    from hybridremat.integrations.lightning import (
        HybridRematLightningCallback as HybridRematLightningCallback,
    )
    from hybridremat.integrations.optimizer_in_backward import optimizer_in_backward
    from hybridremat.integrations.transformers_trainer import (
        HybridRematTrainerCallback as HybridRematTrainerCallback,
    )
    from hybridremat.planning.plan import Plan
    from hybridremat.plans.fsdp import Fsdp
    from hybridremat.reports.size_curve import SizeCurve
    from hybridremat.runtime.auto_limit import AutoLimit, auto_limit
    from hybridremat.runtime.tune import tune
    from hybridremat.runtime.tuning import Tuning

__all__ = [
    "AutoLimit",
    "BatchSize",
    "CaptureError",
    "CostModelError",
    "DagError",
    "DagPlan",
    "DeviceMemoryWarning",
    "DeviceSpec",
    "DeviceSpecError",
    "DoubleBackwardError",
    "EarlyGradientError",
    "Fit",
    "Frontier",
    "Fsdp",
    "GeneratedCodeError",
    "GraphBreakWarning",
    "GraphSizeError",
    "HeldOutputWarning",
    "HybridRematError",
    "InfeasibleLimitError",
    "InfeasibleLimitWarning",
    "InputError",
    "KeptGradientWarning",
    "LimitError",
    "MeasuredPoint",
    "Measurement",
    "MeasurementError",
    "MissingPackageError",
    "ModelError",
    "OffloadError",
    "OptionsError",
    "OutputError",
    "OutstandingForwardWarning",
    "PipelineFit",
    "PipelinePlan",
    "Plan",
    "PlanError",
    "PlanFormatError",
    "PlanMismatchError",
    "PlannedStage",
    "PlotError",
    "PolicyError",
    "PredictionWarning",
    "ProfilerActiveError",
    "RankError",
    "ShardedFit",
    "SizeCurve",
    "TargetError",
    "Tuning",
    "TuningError",
    "UnsurveyedPathWarning",
    "UntriedKernelError",
    "UsageError",
    "auto_limit",
    "fit",
    "frontier",
    "get_plan",
    "max_batch_size",
    "measure",
    "opaque",
    "optimizer_in_backward",
    "pipeline_plan",
    "plan",
    "plan_dag",
    "prepare",
    "tune",
    "unwrap",
    "wrap",
    "wrap_each",
]

# Public name → the module that defines it.
_HOME = {
    "wrap": "hybridremat.api",
    "wrap_each": "hybridremat.api",
    "unwrap": "hybridremat.api",
    "plan": "hybridremat.api",
    "plan_dag": "hybridremat.dags",
    "DagPlan": "hybridremat.dags",
    "get_plan": "hybridremat.api",
    "prepare": "hybridremat.api",
    "frontier": "hybridremat.api",
    "opaque": "hybridremat.compiler.opaque_calls",
    "Plan": "hybridremat.planning.plan",
    "Fsdp": "hybridremat.plans.fsdp",
    "SizeCurve": "hybridremat.reports.size_curve",
    "Frontier": "hybridremat.analysis.frontier",
    "DeviceSpec": "hybridremat.graph.costs.device_specs",
    "measure": "hybridremat.analysis.measure",
    "MeasuredPoint": "hybridremat.analysis.frontier_data",
    "max_batch_size": "hybridremat.analysis.batch_search",
    "tune": "hybridremat.runtime.tune",
    "Tuning": "hybridremat.runtime.tuning",
    "AutoLimit": "hybridremat.runtime.auto_limit",
    "auto_limit": "hybridremat.runtime.auto_limit",
    "BatchSize": "hybridremat.analysis.batch_size",
    "fit": "hybridremat.analysis.fit",
    "Fit": "hybridremat.analysis.fit_result",
    "PipelineFit": "hybridremat.analysis.fit_pipeline",
    "ShardedFit": "hybridremat.analysis.fit_sharded",
    "Measurement": "hybridremat.analysis.measure",
    "pipeline_plan": "hybridremat.analysis.pipelines.planning",
    "PipelinePlan": "hybridremat.analysis.pipelines.plan",
    "PlannedStage": "hybridremat.analysis.pipelines.plan_data",
    "optimizer_in_backward": "hybridremat.integrations.optimizer_in_backward",
    # Not in __all__ nor in dir(): these need packages that may not be there, and must not be read unasked.
    "HybridRematTrainerCallback": "hybridremat.integrations.transformers_trainer",
    "HybridRematLightningCallback": "hybridremat.integrations.lightning",
}


class _Face(ModuleType):
    """The class of the package itself: a public name loads its home when it is first read."""

    def __getattr__(self, name: str) -> object:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'hybridremat' has no attribute {name!r}")
        with prompt_interrupts():
            value: object = getattr(import_module(home), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Face

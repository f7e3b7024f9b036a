"""Planning for a device that is not here (``device_spec=``): its costs, and what it cannot hold."""

from __future__ import annotations

import warnings

from hybridremat.errors import DeviceMemoryWarning
from hybridremat.graph.costs.cost_models import CostModel, with_times
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.spec_costs import sized_for
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.units import format_bytes


def costs_there(step: TracedStep, spec: DeviceSpec, model: CostModel) -> TracedStep:
    """The step with sizes and times of the device; nothing is run, and nothing is remembered."""
    return with_times(sized_for(step, spec), model, KernelStore(), lambda *_: None)


def warn_beyond(spec: DeviceSpec, limit: int | None) -> None:
    """Warn of a limit in bytes that the device cannot hold."""
    if limit is not None and limit > spec.memory:
        warnings.warn(
            f"the limit of {format_bytes(limit)} is more than {spec.name} has, {format_bytes(spec.memory)}; "
            "parameters and optimizer state come on top of it",
            DeviceMemoryWarning,
            stacklevel=3,
        )

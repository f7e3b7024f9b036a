"""Costs of a step on a device that is not here: by its rates and its allocator; nothing is run.

What kernels allocate there while they run is not known, and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridremat.graph.costs.cost_models import Progress, roofline_time
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import Kernels
from hybridremat.graph.joint import JointGraph, Op
from hybridremat.graph.tracing.trace import RNG_STATE_BYTES, TracedStep


@dataclass(frozen=True)
class SpecCost:
    """The roofline of a device spec; the flops rate of each op is that of the type it computes in."""

    spec: DeviceSpec
    name: str = "roofline"

    def times(self, step: TracedStep, kernels: Kernels, store: KernelStore, progress: Progress) -> list[int]:
        """See :class:`~hybridremat.graph.costs.cost_models.CostModel`."""
        return [spec_time(step.graph, op, self.spec) for op in step.graph.ops]


def spec_time(graph: JointGraph, op: Op, spec: DeviceSpec) -> int:
    """Nanoseconds of one op on the device."""
    rates = spec.rates(computed_in(graph, op), convolution="convolution" in op.target)
    return roofline_time(op, rates)


def computed_in(graph: JointGraph, op: Op) -> str:
    """The type of the numbers that an op works on: that of its first result, or of what it reads."""
    values = [graph.values[value] for value in (*op.writes, *op.reads)]
    return next((value.dtype for value in values if value.dtype), "")


def sized_for(step: TracedStep, spec: DeviceSpec) -> TracedStep:
    """The same step with sizes as the device's allocator takes them, and no workspaces."""
    graph = step.graph
    sized = replace(
        graph,
        ops=tuple(replace(op, temp=0) for op in graph.ops),
        values=tuple(replace(value, bytes=spec.rounded(value.bytes)) for value in graph.values),
        rng_state_bytes=RNG_STATE_BYTES["cuda"],
    )
    return replace(step, graph=sized)

"""Cost models: nanoseconds and workspace bytes for every op, behind one interface.

- ``profile``: each distinct kernel is run and timed on the device, once per device, torch version and
  thread count (kept on disk); what comes from memory in a step, and not when a kernel runs alone, is added
  (:mod:`hybridremat.graph.costs.cache_misses`).
- ``roofline``: flops and bytes over the device's rates. Nothing is timed.
- ``flops``: flops and bytes over the rates of a nominal device. The same on every machine.

Workspaces (what a kernel allocates beyond its outputs while it runs) are measured whatever the source of
time, by one run of each distinct kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from hybridremat.errors import CostModelError
from hybridremat.graph.costs.cache_misses import with_misses
from hybridremat.graph.costs.collectives import collective_workspace
from hybridremat.graph.costs.copies import copy_rate, miss_price
from hybridremat.graph.costs.footprints import measure_footprints
from hybridremat.graph.costs.kernel_benchmarks import measure_times
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import Kernels, distinct_kernels
from hybridremat.graph.costs.untried import Untried, untried_error, untried_texts
from hybridremat.graph.joint import Op
from hybridremat.graph.tracing.trace import TracedStep

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

COSTS_VERSION = 3  # since bags are tried with something in each

MISS_PRICE = "a MiB to memory and back"
"""The name of this time among those of kernels."""


@dataclass(frozen=True)
class DeviceRates:
    """What a device does in a second: flops, bytes; and the nanoseconds that any call takes."""

    flops: float
    bytes: float
    call_ns: float = 0.0


# One multiply-add core's worth of flops for every two bytes of traffic, so that kernels without products
# cost something, but little beside a product.
NOMINAL = DeviceRates(flops=100e9, bytes=200e9)
CPU_PER_THREAD = DeviceRates(flops=50e9, bytes=10e9, call_ns=2_000)
CUDA_DEFAULT = DeviceRates(flops=60e12, bytes=1.5e12, call_ns=4_000)


class CostModel(Protocol):
    """Gives nanoseconds for every op of a traced step."""

    @property
    def name(self) -> str:
        """What plans call it."""
        ...

    def times(self, step: TracedStep, kernels: Kernels, store: KernelStore, progress: Progress) -> list[int]:
        """Nanoseconds per op, in op order."""
        ...


@dataclass(frozen=True)
class FlopsCost:
    """``flops / rate + bytes / rate`` on the nominal device."""

    name: str = "flops"

    def times(self, step: TracedStep, kernels: Kernels, store: KernelStore, progress: Progress) -> list[int]:
        """See :class:`CostModel`; the sum of both terms."""
        return [_sum_time(op, NOMINAL) for op in step.graph.ops]


@dataclass(frozen=True)
class RooflineCost:
    """``max(flops / rate, bytes / rate)`` plus a call's overhead. ``rates=None``: those of the device."""

    rates: DeviceRates | None = None
    name: str = "roofline"

    def times(self, step: TracedStep, kernels: Kernels, store: KernelStore, progress: Progress) -> list[int]:
        """See :class:`CostModel`; the larger of both terms."""
        rates = self.rates or device_rates(kernels.device)
        return [roofline_time(op, rates) for op in step.graph.ops]


@dataclass(frozen=True)
class ProfileCost:
    """Measured on the device; kernels already known to the store are not run again."""

    name: str = "profile"

    def times(self, step: TracedStep, kernels: Kernels, store: KernelStore, progress: Progress) -> list[int]:
        """See :class:`CostModel`; kernels that cannot be tried (on ``meta`` all) get roofline times."""
        guessed = RooflineCost().times(step, kernels, store, progress)
        if kernels.device == "meta":
            return guessed
        roofline = {key: guess for key, guess in zip(kernels.key_of, guessed, strict=True) if key}
        known = {key: time for key in kernels.node_of if (time := store.times.get(key)) is not None}
        missing = [key for key in kernels.node_of if key not in known]
        measured = measure_times(kernels, missing, roofline, known, progress)
        store.times.update(measured.kept)
        times = {"": 1, **roofline, **known, **measured.doubtful, **measured.kept}
        alone = [times[key] for key in kernels.key_of]
        if fused := generated_times(step, kernels.device):  # at the rate of memory
            return [fused.get(op, time) for op, time in enumerate(alone)]
        return with_misses(step.graph, alone, _miss_price(kernels.device, store))


def _miss_price(device: str, store: KernelStore) -> int:
    """Nanoseconds a MiB; as of kernels, what does not settle is not kept."""
    known = store.times.get(MISS_PRICE)
    if known is not None:
        return known
    price = miss_price(device)
    if price.settled:
        store.times.update({MISS_PRICE: price.nanoseconds})
    return price.nanoseconds


def _sum_time(op: Op, rates: DeviceRates) -> int:
    return max(1, round(1e9 * (op.flops / rates.flops + op.io_bytes / rates.bytes)))


def roofline_time(op: Op, rates: DeviceRates) -> int:
    """Nanoseconds of an op: the larger of both terms, and a call's overhead."""
    return max(1, round(1e9 * max(op.flops / rates.flops, op.io_bytes / rates.bytes) + rates.call_ns))


def generated_times(step: TracedStep, device: str) -> dict[int, int]:
    """Nanoseconds of the kernels that a compiler generates: they move bytes, at the rate measured here."""
    fused = step.fused_ops
    if not fused:
        return {}
    rate = copy_rate(device)
    return {op: max(1, round(1e9 * step.graph.ops[op].io_bytes / rate)) for op in fused}


def device_rates(device: str) -> DeviceRates:
    """Rates of the kind of device; for CPUs by the number of threads that torch uses."""
    if device != "cpu":
        return CUDA_DEFAULT
    threads = torch.get_num_threads()
    return DeviceRates(CPU_PER_THREAD.flops * threads, CPU_PER_THREAD.bytes * threads, CPU_PER_THREAD.call_ns)


_MODELS: dict[str, Callable[[], CostModel]] = {
    "profile": ProfileCost,
    "roofline": RooflineCost,
    "flops": FlopsCost,
}


def cost_model(name: str | CostModel) -> CostModel:
    """The cost model of that name, or the object itself.

    Raises
    ------
    CostModelError
        If there is none of that name.
    """
    if not isinstance(name, str):
        return name
    if name not in _MODELS:
        raise CostModelError(f"cost_model={name!r} is not known; use one of {', '.join(map(repr, _MODELS))}")
    return _MODELS[name]()


def with_footprints(
    step: TracedStep,
    store: KernelStore,
    untried: Untried = "error",
    progress: Callable[[int, int], None] = lambda *_: None,
) -> TracedStep:
    """The same step with ``temp`` of every op and the real sizes of its values, as they are here.

    ``progress``: see :func:`~graph.costs.footprints.measure_footprints`.

    Raises
    ------
    MeasurementError
        If no memory is left to try a kernel.
    UntriedKernelError
        If a kernel cannot be tried, unless ``untried`` is ``"allow"``: then the graph names its ops.
    """
    trials = measure_footprints(step, store, progress)
    store.temporaries.update({key: footprint.workspace for key, footprint in trials.footprints.items()})
    store.outputs.update({key: footprint.outputs for key, footprint in trials.footprints.items()})
    store.shared.update({key: found.shared for key, found in trials.footprints.items() if found.shared})
    kernels = distinct_kernels(step)
    refused = {op: why for op, key in enumerate(kernels.key_of) if (why := trials.refused.get(key))}
    if refused and untried == "error":
        raise untried_error(step, refused)
    ops = tuple(
        replace(op, temp=store.temporaries.get(key) or 0 if key else collective_workspace(node))
        for op, key, node in zip(step.graph.ops, kernels.key_of, step.op_nodes, strict=True)
    )
    values, shared = list(step.graph.values), set[int]()
    for op, key in zip(ops, kernels.key_of, strict=True):
        sizes = (store.outputs.get(key) if key else None) or ()
        sources = [_of_step(step, op, place) for place in store.shared.get(key, ())] or [()] * len(sizes)
        if len(sizes) == len(op.writes):
            for value, size, made in zip(op.writes, sizes, sources, strict=True):
                real = 0 if made is None else size
                shared.update(made or ())
                values[value] = replace(values[value], bytes=max(real, values[value].bytes))
    unknown = tuple(untried_texts(step, refused))
    for text in unknown:
        logger.warning("%s: the memory that it takes while it runs is not counted", text)
    graph = replace(step.graph, ops=ops, values=tuple(values), untried=unknown)
    return replace(step, graph=graph, shared=frozenset(shared))


def _of_step(step: TracedStep, op: Op, place: int) -> tuple[int, ...] | None:
    """The values of an op's input that the step makes, if it has one there; None if it is resident.

    What shares the memory of such values is counted beside them: either may live longer.
    """
    if place < 0:
        return ()
    source, values = step.op_nodes[op.id].all_input_nodes[place], step.graph.values
    made = (values[value] for value in step.node_values[source])
    return tuple(each.id for each in made if each.producer is not None or each.tangent) or None


def with_times(step: TracedStep, model: CostModel, store: KernelStore, progress: Progress) -> TracedStep:
    """The same step with ``time`` of every op."""
    times = model.times(step, distinct_kernels(step), store, progress)
    ops = tuple(_timed(op, time) for op, time in zip(step.graph.ops, times, strict=True))
    return replace(step, graph=replace(step.graph, ops=ops))


def _timed(op: Op, time: int) -> Op:
    """An op with its time; by parts it is taken to need no more."""
    return replace(op, time=time, variants=tuple(replace(each, time=time) for each in op.variants))

"""What collectives take: in PyTorch's own memory beside what they return, and in time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import distributed, fx, nn

from hybridremat.graph.tracing.fx_nodes import is_collective, is_gather, tensors

if TYPE_CHECKING:
    from hybridremat.graph.tracing.trace import TracedStep

SIZES: Final = (1 << 16, 1 << 22)
"""Bytes of each rank in the two gathers that are timed."""
TRIES: Final = 5


def scatters_a_copy(device: str) -> bool:
    """Whether a reduce-scatter reduces a copy of its input everywhere: gloo has none of its own.

    Without a process group yet, that is taken to be so on the CPU.
    """
    if device != "cpu" or not distributed.is_available():
        return False
    return not distributed.is_initialized() or "cpu:gloo" in str(distributed.get_backend_config())


def collective_workspace(node: fx.Node) -> int:
    """Bytes that a node takes while it runs, if it is a collective."""
    if not is_collective(node) or "reduce_scatter" not in str(node.target):
        return 0
    given = [each for source in node.all_input_nodes for each in tensors(source.meta.get("val"))]
    return sum(each.nbytes for each in given if scatters_a_copy(each.device.type))


@dataclass(frozen=True)
class GatherRate:
    """What a gather takes in one group of ranks: nanoseconds for any, and for each byte that arrives."""

    call: float
    byte: float

    @staticmethod
    def of(call: float, bandwidth: float) -> GatherRate:
        """That of a link of so many bytes in a second."""
        return GatherRate(call, 1e9 / bandwidth)

    def time(self, arriving: int) -> int:
        """Nanoseconds of a gather in which so many bytes arrive."""
        return max(1, round(self.call + self.byte * arriving))


def measured_gathers(model: nn.Module) -> dict[str, GatherRate]:
    """Time gathers in each group of ranks that parameters are sharded among; by name of the group.

    All ranks have to call it at the same point, and not while a graph is traced.
    """
    return {name: _measured(group, device) for name, group, device in _groups(model)}


def _groups(model: nn.Module) -> Iterator[tuple[str, distributed.ProcessGroup, torch.device]]:
    seen = set[str]()
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        for group in () if mesh is None else mesh.get_all_groups():
            if group.group_name not in seen and group.size() > 1:
                seen.add(group.group_name)
                yield group.group_name, group, parameter.device


def _measured(group: distributed.ProcessGroup, device: torch.device) -> GatherRate:
    (small, quick), (large, slow) = ((size, _seconds(group, device, size)) for size in SIZES)
    byte = 1e9 * max(0.0, slow - quick) / ((large - small) * (group.size() - 1))
    return GatherRate(max(0.0, 1e9 * quick - byte * small * (group.size() - 1)), byte)


def _seconds(group: distributed.ProcessGroup, device: torch.device, size: int) -> float:
    """Seconds of a gather of ``size`` bytes of each rank: the least of some."""
    own = torch.empty(size, dtype=torch.uint8, device=device)
    whole = torch.empty(size * group.size(), dtype=torch.uint8, device=device)
    taken = []
    for _ in range(TRIES + 1):  # the first sets the group up
        started = time.perf_counter()
        distributed.all_gather_into_tensor(whole, own, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def with_gather_times(step: TracedStep, rates: Mapping[str, GatherRate], other: GatherRate) -> TracedStep:
    """The same step with the time of its gathers: by the rate of their group, or the other one."""
    ops = list(step.graph.ops)
    for op, node in zip(step.graph.ops, step.op_nodes, strict=True):
        if is_gather(node):
            arriving = _bytes_of(node) - sum(map(_bytes_of, node.all_input_nodes))
            rate = next((rates[name] for name in map(str, node.args) if name in rates), other)
            ops[op.id] = replace(op, time=rate.time(max(0, arriving)))
    return replace(step, graph=replace(step.graph, ops=tuple(ops)))


def _bytes_of(node: fx.Node) -> int:
    return sum(each.nbytes for each in tensors(node.meta.get("val")))

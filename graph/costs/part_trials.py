"""Try on the device whether a kernel can be run by parts: with the same bits, and with less workspace.

As for ops in place (:mod:`hybridremat.graph.costs.in_place_trials`), the same bits on random numbers of these
shapes, strides and types are strong evidence, not a proof. Of random ops the generator has to be left in the
same state, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import fx

from hybridremat.graph.costs.allocations import peaks_of
from hybridremat.graph.costs.in_place_trials import bits_of, distinct_arguments, random_like
from hybridremat.graph.costs.kernel_benchmarks import is_out_of_memory, memory_errors, outside_tracing
from hybridremat.graph.costs.kernel_clocks import clock_for
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import Kernels, distinct_kernels
from hybridremat.graph.joint import Op, Variant
from hybridremat.graph.tracing.by_parts import KERNELS, PartedKernel, parted_kernels
from hybridremat.graph.tracing.in_place import laid_out_alike
from hybridremat.graph.tracing.signature import fake_value
from hybridremat.graph.tracing.trace import TracedStep

logger = logging.getLogger(__name__)

WORTH = 0.95  # of what a kernel takes with its result: parts that take more than this are left out


def with_parts(step: TracedStep, store: KernelStore) -> TracedStep:
    """The same step with the ways to run each op by parts that pay, tried where the store does not know.

    Raises
    ------
    MeasurementError
        If no memory is left to try a kernel.
    """
    kernels = distinct_kernels(step)
    if kernels.device == "meta":
        return step
    ops = tuple(_with_variant(step, op, kernels, store) for op in step.graph.ops)
    return replace(step, graph=replace(step.graph, ops=ops))


def _with_variant(step: TracedStep, op: Op, kernels: Kernels, store: KernelStore) -> Op:
    node, key = step.op_nodes[op.id], kernels.key_of[op.id]
    if not key or not op.recomputable:
        return op
    own = Variant("", 1, op.time, op.temp, op.overwrites)
    found = []
    for kernel, parts in parted_kernels(node):
        name = f"{key} of {distinct_arguments(node)} by {parts} {kernel.run.__name__}"
        workspace = _workspace(_Trial(node, kernel, parts, None), name, kernels, store)
        if workspace is None:
            continue
        over = tuple(
            value
            for value, source in laid_out_alike(step, op.id, node.all_input_nodes)
            if kernel.exact
            and _may_overwrite(_Trial(node, kernel, parts, source), name, workspace, kernels, store)
        )
        found.append(Variant(kernel.run.__name__, parts, op.time, workspace, over))
    if not found:
        return op
    best = min(found, key=lambda each: (each.temp, not each.overwrites))
    written = sum(step.graph.values[value].bytes for value in op.writes)
    takes = (best.temp + written * (not best.overwrites), op.temp + written * (not op.overwrites))
    return replace(op, variants=(own, best)) if takes[0] < WORTH * takes[1] else op


def with_part_times(step: TracedStep, store: KernelStore) -> TracedStep:
    """The same step with what the ways by parts take: the op's own time, as they compare when timed in turn.

    Raises
    ------
    MeasurementError
        If no memory is left to time a kernel.
    """
    kernels = distinct_kernels(step)
    ops = tuple(_part_timed(step.op_nodes[op.id], op, kernels, store) for op in step.graph.ops)
    return replace(step, graph=replace(step.graph, ops=ops))


def _part_timed(node: fx.Node, op: Op, kernels: Kernels, store: KernelStore) -> Op:
    if not op.variants:
        return op
    own, parts = op.variants
    name = f"{kernels.key_of[op.id]} of {distinct_arguments(node)} by {parts.parts} {parts.kernel}"
    if (percent := store.time(name)) is None:
        percent = _percent(_Trial(node, KERNELS[parts.kernel], parts.parts, None), kernels.device)
        store.add_times({name: percent})
    timed = replace(parts, time=max(own.time, own.time * percent // 100))
    return replace(op, variants=(own, timed))


def _percent(trial: _Trial, device: str) -> int:
    """The least time of a kernel by parts as a percentage of the op's own, timed one after the other."""
    clock = clock_for(device)
    with outside_tracing(), memory_errors():
        own, parts = (clock.least(call) for call in _calls(trial))
    percent: int = max(1, 100 * parts // max(1, own))
    return percent


@dataclass(frozen=True)
class _Trial:
    """A kernel by parts, and the input that it is to write over."""

    node: fx.Node
    kernel: PartedKernel
    parts: int
    over: fx.Node | None


def _workspace(trial: _Trial, name: str, kernels: Kernels, store: KernelStore) -> int | None:
    """Bytes beyond its results; None if it does not give the same bits."""
    known = store.part_workspace(name)
    if known is None:
        known = _tried(trial, kernels)
        store.add_part_workspaces({name: known})
    return known if known >= 0 else None


def _may_overwrite(
    trial: _Trial, name: str, workspace: int, kernels: Kernels, store: KernelStore
) -> bool:
    assert trial.over is not None
    name = f"{name} over {trial.node.all_input_nodes.index(trial.over)}"
    known = store.part_workspace(name)
    if known is None:
        known = _tried(trial, kernels)
        store.add_part_workspaces({name: known})
    return 0 <= known <= workspace


def _tried(trial: _Trial, kernels: Kernels) -> int:
    """Bytes that a kernel by parts allocates beyond its results; −1 if its bits are not the plain ones."""
    with outside_tracing(), memory_errors():
        try:
            if trial.kernel.exact and not _gives_same_bits(trial, kernels.device):
                logger.info("%s by %d parts has other bits", trial.node, trial.parts)
                return -1
            ((peak, left),) = peaks_of([lambda: _calls(trial)[1]], kernels.device)
        except Exception as error:  # whatever a kernel raises for sizes that it does not take
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            logger.warning("%s cannot be tried by parts: %s", trial.node, error)
            return -1
    return peak - left


def _gives_same_bits(trial: _Trial, device: str) -> bool:
    plain, parted = _calls(trial)
    expected, state = _run(plain, device)
    results, other = _run(parted, device)
    if not torch.equal(state, other) or len(expected) != len(results):
        return False
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and a.stride() == b.stride() and _equal(a, b))
        for a, b in zip(expected, results, strict=True)
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))


def _run(call: Callable[[], Any], device: str) -> tuple[list[Any], torch.Tensor]:
    """A call's results from a given seed, and the state of the generator after it."""
    torch.manual_seed(0)
    results = call()
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    return list(results) if isinstance(results, (list, tuple)) else [results], state


def _calls(trial: _Trial) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The plain call on random numbers, and the one by parts on the same, which may write over one."""
    node, seeds = trial.node, count()
    assert callable(node.target)
    given = {source: random_like(fake_value(source), next(seeds)) for source in node.all_input_nodes}
    args: Any = fx.map_arg(node.args, given.__getitem__)
    over = given[trial.over] if trial.over is not None else None
    return partial(node.target, *args), partial(trial.kernel.run, *args, parts=trial.parts, over=over)

"""Run each distinct op of a joint graph once or more on real tensors: temporaries and times.

Two ops are the same kernel if target, scalar arguments, and shapes, strides and dtypes of their
tensors are equal. A model has some tens of distinct kernels, so this takes about a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from hybridremat.graph.allocations import peaks_of
from hybridremat.graph.grouped import group_ends, grouped_rows
from hybridremat.graph.nodes import has_effects, storage_bytes, tensors
from hybridremat.graph.private_torch import _disable_current_modes, _neg_view, arg_tree_leaves
from hybridremat.graph.signature import meant_by, signature
from hybridremat.graph.trace import TracedStep

logger = logging.getLogger(__name__)

TIMING_NS = 30_000_000
MIN_REPEATS, MAX_REPEATS = 3, 20


def _real(value: Any) -> Any:
    """A real tensor like the fake one: any numbers that every kernel accepts."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is torch.sparse_coo:
        indices, values = map(_real, tensors(value))
        return torch.sparse_coo_tensor(
            indices, values, value.shape, is_coalesced=value.is_coalesced(), check_invariants=False
        )
    extent = int(value.untyped_storage().nbytes()) // value.element_size()
    if value.dtype.is_floating_point:
        base = torch.rand(extent, dtype=torch.float32, device=value.device).to(value.dtype)
    elif value.dtype == torch.bool:
        base = torch.ones(extent, dtype=torch.bool, device=value.device)
    else:
        base = torch.zeros(extent, dtype=value.dtype, device=value.device)
    real = torch.as_strided(base, value.shape, value.stride(), int(value.storage_offset()))
    # kernels that cannot read a conjugated or negated view make a copy first
    real = real.conj() if value.is_conj() else real
    return _neg_view(real) if value.is_neg() else real


@dataclass(frozen=True)
class Kernels:
    """Distinct kernels of a traced step: ``key_of[op]`` is a signature, ``node_of[key]`` one node."""

    key_of: tuple[str, ...]
    node_of: dict[str, fx.Node]
    device: str


def distinct_kernels(step: TracedStep) -> Kernels:
    """Group the ops of a step by kernel.

    In-place updates are left out, since they only touch residents, and ops with effects: they run in the
    step alone, never to be measured.
    """
    keys = tuple(
        "" if op.mutates or has_effects(node) else signature(node)
        for op, node in zip(step.graph.ops, step.op_nodes, strict=True)
    )
    nodes: dict[str, fx.Node] = {}
    for key, node in zip(keys, step.op_nodes, strict=True):
        if key:
            nodes.setdefault(key, node)
    devices = {t.device.type for n in step.op_nodes for t in tensors(n.meta.get("val"))}
    return Kernels(keys, nodes, next(iter(sorted(devices - {"cpu"})), "cpu"))


def _prepared(node: fx.Node) -> partial[object]:
    """Make real inputs; the result calls the node's kernel on them."""
    assert callable(node.target)
    ends = group_ends(node)

    def made(source: fx.Node) -> Any:
        real = _real(meant_by(source))
        return real.fill_(grouped_rows(node)) if source is ends else real

    args: Any = fx.map_arg(node.args, made)
    kwargs: Any = fx.map_arg(node.kwargs, made)
    return partial(node.target, *args, **kwargs)


@contextmanager
def _outside_tracing() -> Iterator[None]:
    """Real execution without touching generators, autograd, autocast, or a running trace's fake tensors."""
    cuda = torch.cuda.is_available()
    devices = range(torch.cuda.device_count()) if cuda else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda") if cuda else ("cpu",):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@dataclass(frozen=True)
class Footprint:
    """Bytes of one kernel: what it allocates beyond its outputs, and each output's real storage.

    A storage can be larger than the traced tensor says: a reduced ``mse_loss`` keeps all its elements.
    """

    temporary: int
    outputs: tuple[int, ...]


def measure_footprints(kernels: Kernels, keys: Sequence[str]) -> dict[str, Footprint]:
    """Footprint of each kernel, from one run of each.

    On the ``meta`` device nothing can run: no temporaries, and storages as traced. The same for a kernel
    that refuses the numbers it is tried with (a factorization), with a warning in the log.
    """
    nodes = [kernels.node_of[key] for key in keys]
    if kernels.device == "meta" or not nodes:
        return {key: Footprint(0, _storages(n.meta.get("val"))) for key, n in zip(keys, nodes, strict=True)}
    outputs: dict[str, tuple[int, ...]] = {}

    def prepared(key: str, node: fx.Node) -> Callable[[], object]:
        call = _prepared(node)
        given = arg_tree_leaves(*call.args, **call.keywords)

        def run() -> object:
            try:
                result = call()
            except RuntimeError as error:
                logger.warning(
                    "%s cannot be tried alone, its temporary memory is not counted: %s", node, error
                )
                return None
            outputs[key] = _storages(result, given)
            return result

        return run

    with _outside_tracing():
        calls = [partial(prepared, key, node) for key, node in zip(keys, nodes, strict=True)]
        figures = peaks_of(calls, kernels.device)
    found = {}
    for key, node, (peak, _) in zip(keys, nodes, figures, strict=True):
        sizes = outputs.get(key)
        temporary = max(0, peak - sum(sizes)) if sizes is not None else 0
        found[key] = Footprint(temporary, sizes if sizes is not None else _storages(node.meta.get("val")))
    return found


def _storages(result: object, given: Sequence[object] = ()) -> tuple[int, ...]:
    """Bytes of each distinct storage among the tensors of a result, in order; not those that were given."""
    sizes: dict[int, int] = {}
    for tensor in tensors(result):
        sizes.setdefault(tensor.untyped_storage()._cdata, storage_bytes(tensor))
    for tensor in tensors(given):
        sizes.pop(tensor.untyped_storage()._cdata, None)
    return tuple(sizes.values())


def measure_times(
    kernels: Kernels, keys: Sequence[str], progress: Callable[[int, int], None]
) -> dict[str, int]:
    """Nanoseconds of each kernel: the least of several runs, after a warm-up."""
    found = {}
    with _outside_tracing():
        for done, key in enumerate(keys):
            progress(done, len(keys))
            try:
                found[key] = _time(_prepared(kernels.node_of[key]), kernels.device)
            except RuntimeError as error:
                logger.warning("%s cannot be timed alone: %s", kernels.node_of[key], error)
                found[key] = 1
    return found


def _time(call: Callable[[], object], device: str) -> int:
    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    call()
    least, spent, repeats = None, 0, 0
    while repeats < MIN_REPEATS or (spent < TIMING_NS and repeats < MAX_REPEATS):
        synchronize()
        start = time.perf_counter_ns()
        result = call()
        synchronize()
        elapsed = time.perf_counter_ns() - start
        del result
        least = elapsed if least is None else min(least, elapsed)
        spent, repeats = spent + elapsed, repeats + 1
    return max(1, least or 1)

"""Run each distinct kernel once or more on real tensors: what it allocates, and how long it takes.

With some tens of distinct kernels in a model this takes about a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from hybridremat.errors import MeasurementError
from hybridremat.graph.costs.allocations import peaks_of
from hybridremat.graph.costs.kernels import Kernels, prepared
from hybridremat.graph.private_torch import _disable_current_modes, arg_tree_leaves
from hybridremat.graph.tracing.fx_nodes import storage_bytes, tensors

logger = logging.getLogger(__name__)

TIMING_NS = 30_000_000
MIN_REPEATS, MAX_REPEATS = 3, 20


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
    """Footprint of each kernel that can be tried alone, from one run of each.

    On the ``meta`` device nothing can run: no temporaries, and storages as traced. A kernel that refuses the
    numbers it is tried with (a factorization) has none, and a warning in the log.

    Raises
    ------
    MeasurementError
        If no memory is left to try a kernel.
    """
    nodes = [kernels.node_of[key] for key in keys]
    if kernels.device == "meta" or not nodes:
        return {key: Footprint(0, _storages(n.meta.get("val"))) for key, n in zip(keys, nodes, strict=True)}
    outputs: dict[str, tuple[int, ...]] = {}

    def trial(key: str, node: fx.Node) -> Callable[[], object]:
        call = prepared(node)
        given = arg_tree_leaves(*call.args, **call.keywords)

        def run() -> object:
            try:
                result = call()
            except RuntimeError as error:
                if _is_out_of_memory(error):
                    raise
                logger.warning(
                    "%s cannot be tried alone, its temporary memory is not counted: %s", node, error
                )
                return None
            outputs[key] = _storages(result, given)
            return result

        return run

    with _outside_tracing(), _memory_errors():
        calls = [partial(trial, key, node) for key, node in zip(keys, nodes, strict=True)]
        figures = peaks_of(calls, kernels.device)
    return {
        key: Footprint(max(0, peak - sum(outputs[key])), outputs[key])
        for key, (peak, _) in zip(keys, figures, strict=True)
        if key in outputs
    }


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """A lack of memory as an error of ours: nothing is known about a kernel that could not run for it."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise MeasurementError(
            "no memory was left to try a single kernel of the model, and what it needs must be known to plan "
            f"({str(error).splitlines()[0]}). Planning takes the inputs and outputs of the largest kernel at "
            "a time: give back what else holds memory (a plain step's outputs, another process), or plan for "
            "a smaller batch."
        ) from error


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
    """Nanoseconds of each kernel: the least of several runs, after a warm-up.

    Kernels that refuse the numbers they are tried with are left out, with a warning in the log.

    Raises
    ------
    MeasurementError
        If no memory is left to try a kernel.
    """
    found = {}
    with _outside_tracing(), _memory_errors():
        for done, key in enumerate(keys):
            progress(done, len(keys))
            try:
                found[key] = _time(prepared(kernels.node_of[key]), kernels.device)
            except RuntimeError as error:
                if _is_out_of_memory(error):
                    raise
                node = kernels.node_of[key]
                logger.warning("%s cannot be timed alone, its time is guessed: %s", node, error)
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

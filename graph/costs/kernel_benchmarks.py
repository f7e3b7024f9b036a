"""Run each distinct kernel some times on real tensors: what it allocates, and how long it takes.

With some tens of distinct kernels in a model this takes about a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import fx

from hybridremat.errors import MeasurementError
from hybridremat.graph.costs.allocations import peaks_of
from hybridremat.graph.costs.kernel_clocks import clock_for
from hybridremat.graph.costs.kernel_times import PASSES, KernelTimes, Neighbours, measured_times
from hybridremat.graph.costs.kernels import Kernels, prepared
from hybridremat.graph.private_torch import _disable_current_modes, arg_tree_leaves
from hybridremat.graph.tracing.fx_nodes import storage_bytes, tensors
from hybridremat.graph.tracing.signature import kernel_signature

logger = logging.getLogger(__name__)


@contextmanager
def outside_tracing() -> Iterator[None]:
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

    workspace: int
    outputs: tuple[int, ...]


def measure_footprints(kernels: Kernels, keys: Sequence[str]) -> dict[str, Footprint]:
    """Footprint of each kernel that can be tried alone, from one run of each.

    On the ``meta`` device nothing can run: no workspaces, and storages as traced. A kernel that refuses the
    numbers it is tried with (a factorization) has none, and a warning in the log.

    Raises
    ------
    MeasurementError
        If no memory is left to try a kernel.
    """
    nodes = [kernels.node_of[key] for key in keys]
    if kernels.device == "meta" or not nodes:
        return {key: Footprint(0, _storages(n.meta.get("val"))) for key, n in zip(keys, nodes, strict=True)}
    calls = {key: partial(prepared, node) for key, node in zip(keys, nodes, strict=True)}
    return _footprints(calls, kernels.device)


def _footprints(calls: Mapping[str, Callable[[], partial[object]]], device: str) -> dict[str, Footprint]:
    """Footprint of each call that can be tried; ``calls`` make inputs and return the call on them.

    On CUDA each is called once before it is measured: libraries allocate at their first call what they then
    keep (cuBLAS's workspace, 32 MiB on Hopper), which is no part of any later one.
    """
    outputs: dict[str, tuple[int, ...]] = {}

    def trial(key: str, make: Callable[[], partial[object]]) -> Callable[[], object]:
        call = make()
        given = arg_tree_leaves(*call.args, **call.keywords)
        if device == "cuda":
            with suppress(RuntimeError):  # it will be raised again, and told, by the run that is measured
                call()

        def run() -> object:
            try:
                result = call()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                logger.warning(
                    "%s cannot be tried alone, its temporary memory is not counted: %s", call.func, error
                )
                return None
            outputs[key] = _storages(result, given)
            return result

        return run

    with outside_tracing(), memory_errors():
        figures = peaks_of([partial(trial, key, make) for key, make in calls.items()], device)
    return {
        key: Footprint(max(0, peak - sum(outputs[key])), outputs[key])
        for key, (peak, _) in zip(calls, figures, strict=True)
        if key in outputs
    }


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a kernel could not run for lack of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def memory_errors() -> Iterator[None]:
    """A lack of memory as an error of ours: nothing is known about a kernel that could not run for it."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
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
    kernels: Kernels,
    keys: Sequence[str],
    roofline: Mapping[str, int],
    known: Mapping[str, int],
    progress: Callable[[int, int], None],
) -> KernelTimes:
    """Nanoseconds of each kernel, held against the times of its neighbours.

    Kernels that refuse the numbers they are tried with are left out, with a warning in the log.

    Parameters
    ----------
    roofline
        Nanoseconds of every kernel of the step, by flops and bytes.
    known
        Nanoseconds of kernels of the step that are known already.

    Raises
    ------
    MeasurementError
        If no memory is left to try a kernel.
    """
    clock = clock_for(kernels.device)
    samples = count()

    def sample(key: str) -> int | None:
        done, part = divmod(next(samples), PASSES)
        if part == 0 and done < len(keys):
            progress(done, len(keys))
        node = kernels.node_of[key]
        try:
            return clock.least(prepared(node))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            logger.warning("%s cannot be timed alone, its time is guessed: %s", node, error)
            return None

    op_of = {key: _op(node) for key, node in kernels.node_of.items()}
    with outside_tracing(), memory_errors():
        times = measured_times(keys, sample, Neighbours(op_of, roofline, known))
    for key in times.doubtful:
        logger.info("the time of %s did not settle and is not kept", kernels.node_of[key])
    return times


def _op(node: fx.Node) -> str:
    """The op and the type that it computes in: kernels of the same op are alike."""
    dtype = next((tensor.dtype for tensor in tensors(node.meta.get("val"))), None)
    return f"{node.target} {dtype}"


_workspaces: dict[str, int | None] = {}


def workspace_of(node: fx.Node, layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> int | None:
    """Workspace bytes of a kernel on tensors of these sizes and strides, measured once a process.

    None for a kernel that cannot be tried on them.

    Raises
    ------
    MeasurementError
        If no memory is left to try it.
    """
    key = f"{kernel_signature(node)} {layouts}"
    if key not in _workspaces:
        device = next((part.device.type for part in tensors(node.meta.get("val"))), "cpu")
        found = _footprints({key: partial(prepared, node, layouts)}, device).get(key)
        _workspaces[key] = None if found is None else found.workspace
    return _workspaces[key]

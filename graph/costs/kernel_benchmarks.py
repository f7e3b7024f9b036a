"""Run each distinct kernel some times on real tensors: how long it takes.

With some tens of distinct kernels in a model this takes about a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from torch import fx

from hybridremat.errors import MeasurementError
from hybridremat.graph.costs.kernel_clocks import KernelClock, clock_for
from hybridremat.graph.costs.kernel_times import PASSES, KernelTimes, Neighbours, measured_times
from hybridremat.graph.costs.kernels import Kernels
from hybridremat.graph.costs.made_inputs import DEPTHS, prepared
from hybridremat.graph.outside import outside_tracing
from hybridremat.graph.tracing.fx_nodes import tensors

logger = logging.getLogger(__name__)


def is_out_of_memory(error: Exception) -> bool:
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
        return _least(clock, kernels.node_of[key], spread=kernels.device == "cuda")

    op_of = {key: _op(node) for key, node in kernels.node_of.items()}
    with outside_tracing(), memory_errors():
        times = measured_times(keys, sample, Neighbours(op_of, roofline, known))
    for key in times.doubtful:
        logger.info("the time of %s did not settle and is not kept", kernels.node_of[key])
    return times


def _least(clock: KernelClock, node: fx.Node, *, spread: bool) -> int | None:
    """The least time on inputs that the kernel accepts; None if it accepts none.

    On CUDA indices are spread over their range: where all are the same, atomic additions wait for each other.
    """
    told = ""
    for depth in DEPTHS:
        try:
            return clock.least(prepared(node, spread=spread, depth=depth))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            told = told or str(error)
    logger.warning("%s cannot be timed alone, its time is guessed: %s", node, told)
    return None


def _op(node: fx.Node) -> str:
    """The op and the type that it computes in: kernels of the same op are alike."""
    dtype = next((tensor.dtype for tensor in tensors(node.meta.get("val"))), None)
    return f"{node.target} {dtype}"

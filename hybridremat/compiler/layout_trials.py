"""Run a kernel alone on made-up numbers, to see which strides its results have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hybridremat.graph.costs.kernel_benchmarks import is_out_of_memory, memory_errors
from hybridremat.graph.outside import outside_tracing
from hybridremat.graph.rewrites.trial import Inputs
from hybridremat.graph.tracing.fx_nodes import tensors
from hybridremat.graph.tracing.signature import kernel_signature


class LayoutTrials:
    """Results of kernels, one for each kernel and layout of its inputs; they are kept without memory."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def __call__(self, node: fx.Node, inputs: Mapping[fx.Node, Any]) -> Any:
        """See :data:`~hybridremat.graph.tracing.layouts.RealResults`; the result is on the meta device.

        Raises
        ------
        MeasurementError
            If no memory is left for the kernel.
        """
        if not all(tensor.device.type in ("cpu", "cuda") for v in inputs.values() for tensor in tensors(v)):
            return None
        name = kernel_signature(node)
        if name not in self._known:
            with outside_tracing(), memory_errors():
                self._known[name] = _tried(node)
        return self._known[name]


def _tried(node: fx.Node) -> Any:
    try:
        result = Inputs(node).plain()()
    except IndexError:  # numbers that it does not take
        return None
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return None
    return _without_memory(result)


def _without_memory(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return tuple(map(_without_memory, result))
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return result
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")

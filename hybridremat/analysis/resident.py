"""Bytes that tensors take on a device, each storage once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from hybridremat.compiler.capture import model_device
from hybridremat.compiler.sample_inputs import input_leaves
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.graph.private_torch import is_traceable_wrapper_subclass
from hybridremat.graph.tracing.fx_nodes import CUDA_ALLOCATION, strided_parts


def rounding(model: nn.Module, spec: DeviceSpec | None) -> Callable[[int], int]:
    """Bytes that the allocator takes for a size, where the model is or on the device of ``spec``."""
    if spec is not None:
        return spec.rounded
    unit = CUDA_ALLOCATION if model_device(model) == "cuda" else 1
    return lambda size: -(-size // unit) * unit


def resident_bytes(tree: object, rounded: Callable[[int], int]) -> int:
    """Bytes of the tensors in a tree; those that share memory count once."""
    tensors = [item for item in input_leaves(tree) if isinstance(item, Tensor)]
    storages = [part.untyped_storage() for tensor in tensors for part in _parts(tensor)]
    return sum(rounded(size) for size in {id(each): each.nbytes() for each in storages}.values())


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The strided tensors that a tensor consists of: itself, or what a subclass or a sparse one holds."""
    if not is_traceable_wrapper_subclass(tensor):
        yield from strided_parts(tensor.detach())
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor names its mesh as well
            yield from _parts(part)

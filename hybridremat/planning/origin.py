"""Make the record of what a plan is for: model, inputs and device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hybridremat.compiler.capture import model_device
from hybridremat.compiler.sample_inputs import input_leaves
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.graph.costs.kernel_store import device_description
from hybridremat.graph.private_torch import tree_flatten_with_path
from hybridremat.plans.origin import SPEC_MARK, Origin, TensorSpec
from hybridremat.version import __version__


def origin_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], spec: DeviceSpec | None = None
) -> Origin:
    """The record of a model and of the inputs that it is called with, here or on the device of ``spec``."""
    parameters = list(model.parameters())
    device = model_device(model) if spec is None else "cuda"
    return Origin(
        model=type(model).__name__,
        inputs=tuple(_specs(args, kwargs)),
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        device=device,
        device_name=device_description(device) if spec is None else spec.name + SPEC_MARK,
        hybridremat=__version__,
        torch=torch.__version__,
    )


def graph_origin(inputs: Sequence[Any]) -> Origin:
    """The record of a graph that Dynamo captured, whose parameters are among its ``inputs``."""
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    return origin_on(next((tensor.device.type for tensor in tensors), "cpu"), _specs(tensors, {}))


def origin_on(device: str, inputs: Iterable[TensorSpec]) -> Origin:
    """The record of a graph of no known model, with inputs on a kind of device."""
    return Origin(
        inputs=tuple(inputs),
        device=device,
        device_name=device_description(device),
        hybridremat=__version__,
        torch=torch.__version__,
    )


def _specs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[TensorSpec]:
    for path, leaf in tree_flatten_with_path((list(args), dict(kwargs)))[0]:
        (_, *below) = path  # the first key chooses between args and kwargs
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in below)
        for number, each in enumerate(input_leaves(leaf)):
            if isinstance(each, torch.Tensor):
                inside = "" if each is leaf else f".{number}"
                yield TensorSpec(name + inside, tuple(each.shape), str(each.dtype).removeprefix("torch."))

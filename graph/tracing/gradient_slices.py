"""Input gradients of convolutions that are read through slices only, made slice by slice.

Such is the gradient of a concatenation: whole, it lives until the last slice has been read. In parts, each is
a tensor of its own, and can be made when it is needed. Weight and bias have their gradients first, in a call
that reads the input for the last time.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, fx

from hybridremat.graph.private_torch import OpOverload, detect_fake_mode
from hybridremat.graph.tracing.fx_nodes import slice_arguments

_CONVOLUTION: Final = torch.ops.aten.convolution_backward.default
_SLICE: Final = torch.ops.aten.slice.Tensor


@torch.library.custom_op("hybridremat::convolution_input_gradient", mutates_args=())
def convolution_input_gradient(
    gradient: Tensor,
    weight: Tensor,
    input_size: list[int],
    start: int,
    end: int,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    channels_last: bool,
) -> Tensor:
    """Channels ``start`` to ``end`` of the gradient of a convolution's input, of size ``input_size``."""
    size = [input_size[0], end - start, *input_size[2:]]
    unread = gradient.new_empty(1).expand(size)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    part = weight[:, start:end]
    made: Tensor = _CONVOLUTION(
        gradient,
        unread,
        part.contiguous(memory_format=torch.channels_last) if channels_last else part,
        *(None, stride, padding, dilation, False, [0] * len(stride), 1, [True, False, False]),
    )[0]
    return made.contiguous(memory_format=wanted)


@convolution_input_gradient.register_fake
def _(
    gradient: Tensor,
    _weight: Tensor,
    input_size: list[int],
    start: int,
    end: int,
    _stride: list[int],
    _padding: list[int],
    _dilation: list[int],
    channels_last: bool,
) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    size = [input_size[0], end - start, *input_size[2:]]
    return torch.empty(size, dtype=gradient.dtype, device=gradient.device, memory_format=layout)


INPUT_GRADIENT: Final = torch.ops.hybridremat.convolution_input_gradient.default


def slice_bounds(node: fx.Node) -> tuple[int, int] | None:
    """First and last channel of a slice of channels; None for any other node."""
    if node.target is not _SLICE:
        return None
    dim, first, last, step = slice_arguments(node)
    source: Any = node.args[0]
    channels = source.meta["val"].shape[1]
    if dim != 1 or step != 1:
        return None
    start, end, _ = slice(first, last).indices(channels)
    return (start, end) if start < end else None


@dataclass(frozen=True)
class SlicedGradient:
    """A call for a convolution's gradients, its input's, and all that reads this one: slices of channels."""

    call: fx.Node
    gradient: fx.Node
    slices: dict[fx.Node, tuple[int, int]]

    @property
    def without_input(self) -> tuple[Any, ...]:
        """Arguments of the call for the other gradients alone."""
        arguments: tuple[Any, ...] = self.call.args
        *others, mask = arguments
        return *others, [False, *mask[1:]]

    def arguments(self, part: fx.Node) -> tuple[Any, ...]:
        """What :func:`convolution_input_gradient` takes for one of the slices."""
        arguments: tuple[Any, ...] = self.call.args
        arrived, given, weight, _, stride, padding, dilation, *_ = arguments
        whole = self.gradient.meta["val"]
        size = [int(length) for length in given.meta["val"].shape]
        return (
            *(arrived, weight, size, *self.slices[part]),
            *(list(stride), list(padding), list(dilation)),
            not whole.is_contiguous(),
        )


def sliced_gradients(module: fx.GraphModule) -> list[SlicedGradient]:
    """The input gradients of convolutions without groups that are read by slices without overlap alone."""
    found = []
    for call in module.graph.find_nodes(op="call_function", target=_CONVOLUTION):
        transposed, _, groups, mask = call.args[7:]
        gradients = [user for user in call.users if user.args[1:] == (0,) and user.target is operator.getitem]
        if transposed or groups != 1 or not mask[0] or len(gradients) != 1:
            continue
        (gradient,) = gradients
        slices = {user: bounds for user in gradient.users if (bounds := slice_bounds(user)) is not None}
        if _fits(gradient, slices):
            found.append(SlicedGradient(call, gradient, slices))
    return found


def _fits(gradient: fx.Node, slices: dict[fx.Node, tuple[int, int]]) -> bool:
    """Whether slices alone read a gradient, no channel twice, and ordinary ops read them."""
    value = gradient.meta["val"]
    dense = value.is_contiguous() or (
        value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    )
    bounds = sorted(slices.values())
    apart = all(one[1] <= other[0] for one, other in pairwise(bounds))
    readers = [reader for part in slices for reader in part.users]
    return (
        len(slices) > 1
        and len(slices) == len(gradient.users)
        and dense
        and apart
        and bool(readers)
        and all(_only_reads(reader) for reader in readers)
    )


def _only_reads(node: fx.Node) -> bool:
    """Whether a node makes new tensors of what it is given: no view, update or output."""
    target = node.target
    return (
        isinstance(target, OpOverload)
        and all(entry.alias_info is None for entry in target._schema.arguments)
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def make_by_slices(module: fx.GraphModule, sliced: SlicedGradient) -> None:
    """Write a call for each slice in place of it, and one for the other gradients."""
    graph, call = module.graph, sliced.call
    for part in sliced.slices:
        with graph.inserting_before(part):
            made = graph.call_function(INPUT_GRADIENT, sliced.arguments(part))
        made.meta = {**call.meta, "val": _fake(made)}
        part.replace_all_uses_with(made)
        graph.erase_node(part)
    graph.erase_node(sliced.gradient)
    arguments: tuple[Any, ...] = sliced.without_input
    if any(arguments[-1]):
        call.args = arguments
        call.meta["val"] = (None, *call.meta["val"][1:])
    else:
        graph.erase_node(call)


def _fake(node: fx.Node) -> Any:
    args: Any = fx.map_arg(node.args, lambda source: source.meta["val"])
    mode = detect_fake_mode(args)
    assert mode is not None
    with mode:
        return INPUT_GRADIENT(*args)

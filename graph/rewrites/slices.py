"""Input gradients of convolutions that are read through slices only, made slice by slice.

Such is the gradient of a concatenation: whole, it lives until the last slice has been read. In parts, each is
a tensor of its own, and can be made when it is needed. Weight and bias have their gradients first, in a call
that reads the input for the last time.

A slice of a whole tensor and a tensor of its own differ in their strides, which a kernel that reads them may
go by (a sum adds up in their order). So a slice may be read where it would have the same strides, by kernels
that move what they are given or lay it out first, and by those that compute each element by itself, in the
same way in both. All that read a slice are then tried with both.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, Final

import torch
from torch import Tensor, fx

from hybridremat.graph.costs.index_ranges import index_ranges
from hybridremat.graph.costs.kernel_benchmarks import memory_errors
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.outside import outside_tracing
from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.rewrites.rewrite import Call, Joint, Rewrite
from hybridremat.graph.rewrites.trial import bits_of, draws, random_like, refusals, same_bits
from hybridremat.graph.tracing.flops import FLOPS
from hybridremat.graph.tracing.fx_nodes import NUMBERS, Numbers, fake_call, slice_arguments
from hybridremat.graph.tracing.signature import distinct_arguments, fake_value, kernel_signature

logger = logging.getLogger(__name__)

_CONVOLUTION: Final = torch.ops.aten.convolution_backward.default
_SLICE: Final = torch.ops.aten.slice.Tensor

_LAID_OUT_FIRST: Final = frozenset(
    (
        *("aten.clone.default", "aten.copy.default", "aten.cat.default", "aten.constant_pad_nd.default"),
        *("aten.slice_backward.default", "aten.select_backward.default", "aten.slice_scatter.default"),
        *("aten.convolution_backward.default", "aten.convolution.default"),
        *("aten.avg_pool2d_backward.default", "aten.max_pool2d_with_indices_backward.default"),
        *("aten.upsample_nearest2d_backward.default", "aten.upsample_bilinear2d_backward.default"),
    )
)
"""Kernels that move elements as they are, or first bring what they read into one layout."""


def _layout(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format


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
    part = weight[:, start:end]
    made: Tensor = _CONVOLUTION(
        gradient,
        unread,
        part.contiguous(memory_format=torch.channels_last) if channels_last else part,
        *(None, stride, padding, dilation, False, [0] * len(stride), 1, [True, False, False]),
    )[0]
    return made.contiguous(memory_format=_layout(channels_last))


@convolution_input_gradient.register_fake
def _(gradient: Tensor, _weight: Tensor, input_size: list[int], start: int, end: int, *rest: Any) -> Tensor:
    size = [input_size[0], end - start, *input_size[2:]]
    return torch.empty(size, dtype=gradient.dtype, device=gradient.device, memory_format=_layout(rest[-1]))


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
    def given(self) -> fx.Node:
        """The convolution's input."""
        given: Any = self.call.args[1]
        assert isinstance(given, fx.Node)
        return given

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


def sliced_gradients(joint: Joint) -> list[SlicedGradient]:
    """The input gradients of convolutions without groups that are read by slices without overlap alone."""
    found = []
    for call in joint.module.graph.find_nodes(op="call_function", target=_CONVOLUTION):
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


def _proven(_joint: Joint, sites: Sequence[SlicedGradient], store: KernelStore) -> list[SlicedGradient]:
    """Those whose slices, and all that reads these, have the same bits."""
    passed = []
    for sliced in sites:
        name = _name(sliced)
        if store.in_place.get(name) is None:
            same = False
            with outside_tracing(), memory_errors(), refusals(sliced.gradient, "by slices"):
                same = _has_same_bits(sliced)
            store.in_place.update({name: same})
        if store.in_place.get(name):
            passed.append(sliced)
        else:
            logger.info("%s is made whole: its slices have other bits", sliced.gradient)
    return passed


def _name(sliced: SlicedGradient) -> str:
    """The kernels of a trial: of the gradient, and of all that reads its slices."""
    readers = [
        f"{bounds}: {kernel_signature(reader)} of {distinct_arguments(reader)}"
        for part, bounds in sliced.slices.items()
        for reader in part.users
    ]
    return f"{kernel_signature(sliced.call)} by slices, {'; '.join(readers)}"


def _has_same_bits(sliced: SlicedGradient) -> bool:
    readers = [(reader, part) for part in sliced.slices for reader in part.users]
    if not all(_reads_alike(sliced, reader, part) for reader, part in readers):
        return False
    times = draws(sliced.call, *sliced.slices, *(reader for reader, _ in readers))
    return all(_same_on(sliced, draw) for draw in range(times))


def _reads_alike(sliced: SlicedGradient, reader: fx.Node, part: fx.Node) -> bool:
    """Whether there is a reason for a reader to make the same of a slice as of a tensor of its own."""
    from hybridremat.graph.rewrites.by_element import same_by_element  # not where nothing is joined

    view, layout = part.meta["val"], _layout(sliced.arguments(part)[-1])
    own = torch.empty(view.shape, device="meta", memory_format=layout)
    steps = zip(view.shape, view.stride(), own.stride(), strict=True)
    return (
        all(size == 1 or one == other for size, one, other in steps)
        or str(reader.target) in _LAID_OUT_FIRST
        or same_by_element(reader, part, view.stride(), own.stride())
    )


def _same_on(sliced: SlicedGradient, draw: int) -> bool:
    """Whether the slices, and all that reads these, have the same bits on the numbers of a draw."""
    seeds = count(draw)
    given: dict[fx.Node, Any] = {}

    def real(node: fx.Node) -> Any:
        if node not in given:
            places = min((index_ranges(user).get(node, 2) for user in node.users), default=2)
            given[node] = random_like(fake_value(node), next(seeds), places)
        return given[node]

    def read(reader: fx.Node, part: fx.Node, value: Tensor) -> Any:
        given[part] = value
        return _run(reader.target, reader.args, reader.kwargs, real)

    call = sliced.call
    whole, *others = _run(call.target, call.args, call.kwargs, real)
    if not same_bits(others, list(_run(call.target, sliced.without_input, {}, real)[1:])):
        return False
    for part, (start, end) in sliced.slices.items():
        made, view = _run(INPUT_GRADIENT, sliced.arguments(part), {}, real), whole[:, start:end]
        both = ((read(each, part, view), read(each, part, made)) for each in part.users)
        if not torch.equal(bits_of(made), bits_of(view)) or not all(same_bits(*pair) for pair in both):
            return False
        given.pop(part)
    return True


def _run(target: Any, args: Any, kwargs: Any, real: Any) -> Any:
    return target(*fx.map_arg(args, real), **fx.map_arg(kwargs, real))


def _make_by_slices(joint: Joint, sites: Sequence[SlicedGradient]) -> None:
    """Write a call for each slice in place of a gradient, and one for the other gradients."""
    graph = joint.module.graph
    for sliced in sites:
        call = sliced.call
        for part in sliced.slices:
            with graph.inserting_before(part):
                made = graph.call_function(INPUT_GRADIENT, sliced.arguments(part))
            made.meta = {**call.meta, "val": fake_call(INPUT_GRADIENT, made.args, {}, call)}
            made.meta |= {FLOPS: _flops(made), NUMBERS: Numbers(shape_of=sliced.given)}
            part.replace_all_uses_with(made)
            graph.erase_node(part)
        graph.erase_node(sliced.gradient)
        arguments: tuple[Any, ...] = sliced.without_input
        if any(arguments[-1]):
            call.args = arguments
            call.meta["val"] = (None, *call.meta["val"][1:])
        else:
            graph.erase_node(call)


def _flops(node: fx.Node) -> int:
    """Flops of some channels: every weight meets every output."""
    arrived, weight = (source.meta["val"] for source in node.all_input_nodes)
    return 2 * int(arrived.numel()) * int(node.meta["val"].shape[1]) * int(weight[0, 0].numel())


# What follows is read by the checker, and shares nothing with the functions above.

_GRADIENT: Final = "gradient of a convolution"


def _term(call: Call, plain: Callable[[fx.Node], Call]) -> Call | None:
    """A gradient of a convolution, or channels of one, from and to.

    A gradient does not depend on which others its call makes. That of the input depends on the input's size
    alone, and a slice of its channels is what a call for these channels makes.
    """
    source: Any = call.args[0] if call.args else None
    if call.target is INPUT_GRADIENT:
        arrived, weight, size, start, end, stride, padding, dilation, _ = call.args
        settings = stride, padding, dilation, False, [0] * len(stride), 1
        return Call("channels", (Call(_GRADIENT, (0, arrived, size, weight, *settings)), start, end))
    if call.target is operator.getitem and (whole := plain(source)).target is _CONVOLUTION:
        arrived, given, weight, bias_size, *others, _ = whole.args
        read = (list(given.meta["val"].shape), weight) if call.args[1] == 0 else (given, weight, bias_size)
        return Call(_GRADIENT, (call.args[1], arrived, *read, *others))
    if call.target is not _SLICE or not isinstance(source, fx.Node) or call.kwargs:
        return None
    gradient, (dim, first, last, step) = plain(source), slice_arguments(call)  # type: ignore[arg-type]
    if gradient.target != _GRADIENT or gradient.args[0] != 0 or dim != 1 or step != 1:
        return None
    start, end, _ = slice(first, last).indices(source.meta["val"].shape[1])
    return Call("channels", (gradient, start, end))


SLICES: Final = Rewrite(
    name="slices of a convolution's input gradient",
    find=sliced_gradients,
    proven=_proven,
    write=_make_by_slices,
    term=_term,
)

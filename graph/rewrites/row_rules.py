"""Per-op rules for propagating row-wise tensors, by which a region is followed.

:func:`find_region` follows the logits from their product through everything that reads them. Each call there
works on rows alone, and is written for a chunk of them into the region's body; or it sums over rows, or
multiplies by rows, and gives a result of the region. Anything else is refused, with a reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.rewrites.by_chunks import PRODUCT, ROWS, SUM
from hybridremat.graph.rewrites.loss_region import Choice, NotByChunksError, Region, Result, RowLayout, named
from hybridremat.graph.tracing.fx_nodes import argument, put_back, slice_arguments

ATEN: Final = torch.ops.aten
CONVERT: Final = torch.ops.prims.convert_element_type.default  # what a compiler makes of ``_to_copy``
_SAME: Final = (
    *(ATEN.view.default, ATEN._unsafe_view.default, ATEN.detach.default, ATEN.alias.default),
    *(ATEN.clone.default, ATEN.reshape.default),
)
_DIMS: Final[dict[object, int]] = {  # ops along dimensions, and which argument names these
    ATEN._log_softmax.default: 1,
    ATEN._softmax.default: 1,
    ATEN._log_softmax_backward_data.default: 2,
    ATEN._softmax_backward_data.default: 2,
    ATEN.logsumexp.default: 1,
    ATEN.amax.default: 1,
    ATEN.argmax.default: 1,
    ATEN.sum.dim_IntList: 1,
    ATEN.mean.dim: 1,
    ATEN.squeeze.dim: 1,
    ATEN.squeeze.dims: 1,
}
_SUMS: Final = (ATEN.sum.dim_IntList, ATEN.mean.dim)
_ADDS: Final = (ATEN.add.Tensor, ATEN.sub.Tensor)
_KEEP_ZERO: Final = (  # zero where their first argument is
    *(ATEN.mul.Tensor, ATEN.mul.Scalar, ATEN.div.Tensor, ATEN.div.Scalar, ATEN.neg.default),
    *(ATEN._to_copy.default, CONVERT, ATEN.tanh_backward.default, ATEN.sigmoid_backward.default),
)


def find_region(product: fx.Node) -> Region:
    """The region of a product with a matrix of weights, of two dimensions.

    Raises
    ------
    NotByChunksError
        With what cannot be done by rows.
    """
    region = Region(product, len(product.meta["val"]), products=[product])
    *bias, given, weight = product.args
    if product.kwargs:
        raise NotByChunksError("it scales its factors")
    first = RowLayout()
    factors = region.input(given, first), region.input(weight)
    region.write(product, (*map(region.input, bias), *factors), first)
    for node in _behind(product):
        if any(source in region.layouts for source in node.all_input_nodes):
            _follow(region, node)
    if region.choice is not None and region.sums_all is not None:
        raise NotByChunksError(f"{named(region.sums_all)} sums over rows that the loss leaves out")
    if not region.results:
        raise NotByChunksError("nothing is made of it")
    return region


def _behind(node: fx.Node) -> Iterable[fx.Node]:
    nodes = list(node.graph.nodes)
    return nodes[nodes.index(node) + 1 :]


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _follow(region: Region, node: fx.Node) -> None:
    """Go on with a node that reads the region."""
    target = node.target
    if target is operator.getitem:
        return _item(region, node)
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        raise NotByChunksError(f"{named(node)} reads it")
    for known, follow in _RULES:
        if target in known:
            return follow(region, node)
    if torch.Tag.pointwise in target.tags and not target._schema.is_mutable:
        return _pointwise(region, node)
    raise NotByChunksError(f"{named(node)} is not known to go row by row")


def _same(region: Region, node: fx.Node) -> None:
    """A view or a copy: leading dimensions may be other ones."""
    source: Any = _args(node)[0]
    layout = region.layouts[source]
    if layout.turned and _shape(node) != _shape(source):
        raise NotByChunksError(f"{named(node)} is another view of it")
    if not layout.turned:
        rest = _shape(source)[layout.dims :]
        dims = len(_shape(node)) - len(rest)
        leading = _shape(node)[: max(0, dims)]
        if dims < 1 or _shape(node)[dims:] != rest or prod(leading) != region.count(layout):
            raise NotByChunksError(f"{named(node)} is another view of it")
        layout = replace(layout, dims=dims)
    region.put(node, region.made[source], layout)


def _converted(region: Region, node: fx.Node) -> None:
    source: Any = _args(node)[0]
    if node.meta["val"].device != source.meta["val"].device:
        raise NotByChunksError(f"{named(node)} moves it to another device")
    kwargs = {name: item for name, item in node.kwargs.items() if name != "memory_format"}
    region.write(node, (region.made[source], *_args(node)[1:]), region.layouts[source], kwargs)


def _place(dim: int, dims: int, layout: RowLayout, node: fx.Node) -> int:
    """A dimension of the joint graph as one of the body."""
    place = dim % dims
    if place < layout.dims:
        raise NotByChunksError(f"{named(node)} goes along rows")
    return place - layout.dims + 1


def _unsqueezed(region: Region, node: fx.Node) -> None:
    source, dim = _args(node)
    layout = region.layout_of(source)
    place = _place(dim, len(_shape(node)), layout, node)
    region.write(node, (region.made[source], place), layout)


def _expanded(region: Region, node: fx.Node) -> None:
    source: Any = _args(node)[0]
    layout, shape = region.layout_of(source), _shape(node)
    if shape[: layout.dims] != _shape(source)[: layout.dims] or len(shape) != len(_shape(source)):
        raise NotByChunksError(f"{named(node)} repeats its rows")
    region.write(node, (region.made[source], [-1, *shape[layout.dims :]]), layout)


def _turned(region: Region, node: fx.Node) -> None:
    source: Any = _args(node)[0]
    layout = region.layouts[source]
    if layout.dims != 1 or len(_shape(node)) != 2 or _args(node)[1:] not in ((), ([1, 0],)):
        raise NotByChunksError(f"{named(node)} changes the order of its dimensions")
    region.put(node, region.made[source], replace(layout, turned=not layout.turned))


def _sliced(region: Region, node: fx.Node) -> None:
    """A slice of all rows is nothing, one of some rows chooses them."""
    source: Any = _args(node)[0]
    layout, shape = region.layout_of(source), _shape(source)
    dim, start, end, step = slice_arguments(node)
    dim %= len(shape)
    first, last, _ = slice(start, end).indices(shape[dim])
    if (first, last, step) == (0, shape[dim], 1):
        return region.put(node, region.made[source], layout)
    if dim >= layout.dims:
        raise NotByChunksError(f"{named(node)} leaves columns out")
    choice = Choice(shape[: layout.dims], dim, first, last)
    if layout.state != "all" or step != 1 or region.choice not in (None, choice):
        raise NotByChunksError(f"{named(node)} chooses other rows")
    region.choice = choice
    return region.put(node, region.made[source], replace(layout, state="chosen"))


def _slice_backward(region: Region, node: fx.Node) -> None:
    put = put_back(node)
    if put is None:
        raise NotByChunksError(f"{named(node)} puts rows among others")
    source, size, dim, start, end, step = put
    layout = region.layout_of(source)
    if list(size) == list(_shape(source)):
        return region.put(node, region.made[source], layout)
    dim %= len(size)
    first, last, _ = slice(start, end).indices(size[dim])
    choice = Choice(tuple(size[: layout.dims]), dim, first, last)
    if dim >= layout.dims or layout.state != "chosen" or step != 1 or choice != region.choice:
        raise NotByChunksError(f"{named(node)} puts rows into other places")
    return region.put(node, region.made[source], replace(layout, state="padded"))


def _multiplied(region: Region, node: fx.Node) -> None:
    """The gradient of the product's input, or of its weight."""
    left, right = _args(node)
    layout, other = region.layouts.get(left), region.layouts.get(right)
    region.products.append(node)
    if layout is not None and other is not None:
        raise NotByChunksError(f"{named(node)} multiplies it by itself")
    if layout is not None and not layout.turned:
        if layout.state == "chosen":
            return _another_product(region, node)
        made = region.body.call_function(ATEN.mm.default, (region.made[left], region.input(right)))
        region.results.append(Result(node, ROWS, (made,), layout))
        return None
    if layout is not None:
        factors = region.made[left], region.input(right, _factor(layout))
    elif other is not None and not other.turned and left.target in (ATEN.t.default, ATEN.permute.default):
        layout = other
        factors = region.input(_args(left)[0], _factor(layout)), region.made[right]
    else:
        return _another_product(region, node)
    region.sums(node, layout)
    turned = region.body.call_function(ATEN.t.default, (factors[0],))
    region.results.append(Result(node, PRODUCT, (turned, factors[1]), layout))
    return None


def _factor(layout: RowLayout) -> RowLayout:
    """How the other factor counts rows: for rows of zeros it needs none."""
    return RowLayout(state="chosen" if layout.state == "chosen" else "all")


def _another_product(_: Region, node: fx.Node) -> None:
    raise NotByChunksError(f"{named(node)} is another product")


def _loss(region: Region, node: fx.Node) -> None:
    """``nll_loss_forward``: its sum; a mean is divided by the weight of all rows, which targets tell."""
    given, target, weight, reduction, ignored = _args(node)
    layout = region.layout_of(given)
    if layout.dims != 1 or target in region.layouts:
        raise NotByChunksError(f"{named(node)} is not a loss of rows")
    weights = region.input(weight) if weight is not None else None
    summed = 2 if reduction else 0
    call = region.made[given], region.input(target, layout), weights, summed, ignored
    region.losses[node] = region.body.call_function(ATEN.nll_loss_forward.default, call)
    region.layouts[node] = layout


def _item(region: Region, node: fx.Node) -> None:
    loss, item = _args(node)
    if loss not in region.losses:
        raise NotByChunksError(f"{named(node)} reads it")
    if item == 1:
        region.counts[node] = loss
        return
    made, layout = region.body.call_function(operator.getitem, (region.losses[loss], 0)), region.layouts[loss]
    reduction = _args(loss)[3]
    if reduction == 0:
        region.put(node, made, layout)
        return
    region.sums(node, layout)
    region.results.append(Result(node, SUM, (made,), layout, (), loss if reduction == 1 else None))


def _loss_backward(region: Region, node: fx.Node) -> None:
    arrived, given, target, weight, reduction, ignored, total = _args(node)
    layout = region.layout_of(given)
    if layout.dims != 1:
        raise NotByChunksError(f"{named(node)} is not a loss of rows")
    if arrived in region.layouts:
        first = region.made[arrived]
    else:
        first = region.input(arrived, None if reduction else layout)
    weights = region.input(weight) if weight is not None else None
    rest = region.input(target, layout), weights, reduction, ignored, region.input(total)
    region.write(node, (first, region.made[given], *rest), layout)


def _along(region: Region, node: fx.Node) -> None:
    """An op along dimensions of each row; a sum along all that count rows is a result."""
    position = _DIMS[node.target]
    dims = argument(node, node.target._schema.arguments[position].name)  # type: ignore[union-attr]
    args = [*_args(node), *[None] * (position + 1 - len(node.args))]
    sources = [source for source in args[:position] if isinstance(source, fx.Node)]
    layouts = {region.layout_of(source) for source in sources if source in region.layouts}
    if len(layouts) != 1 or len({_shape(source) for source in sources}) != 1:
        raise NotByChunksError(f"{named(node)} reads different rows of it")
    (layout,), ndim = layouts, len(_shape(sources[0]))
    listed = dims if isinstance(dims, (list, tuple)) else [] if dims is None else [dims]
    along = [dim % ndim for dim in listed] or list(range(ndim))
    if node.target in _SUMS and set(range(layout.dims)) <= set(along):
        return _sum(region, node, layout, along)
    places = [_place(dim, ndim, layout, node) for dim in along]
    args[position] = places if isinstance(dims, (list, tuple)) else places[0]
    for place, source in enumerate(args[:position]):
        if isinstance(source, fx.Node):
            made = region.made.get(source)
            args[place] = region.input(source, layout) if made is None else made
    return region.write(node, args, layout, node.kwargs)


def _sum(region: Region, node: fx.Node, layout: RowLayout, along: Sequence[int]) -> None:
    """A sum or mean over all rows, and maybe other dimensions."""
    source: Any = _args(node)[0]
    shape = _shape(source)
    region.sums(node, layout)
    places = [0, *(dim - layout.dims + 1 for dim in along if dim >= layout.dims)]
    kwargs = {name: item for name, item in node.kwargs.items() if name == "dtype"}
    made = region.body.call_function(ATEN.sum.dim_IntList, (region.made[source], places), kwargs)
    mean = node.target in (ATEN.mean.default, ATEN.mean.dim)
    scale = prod(shape[dim] for dim in along) if mean else None
    kept = tuple(size for dim, size in enumerate(shape) if dim not in along)
    region.results.append(Result(node, SUM, (made,), layout, kept, scale))


def _sum_of_all(region: Region, node: fx.Node) -> None:
    source: Any = _args(node)[0]
    _sum(region, node, region.layout_of(source), range(len(_shape(source))))


def _pointwise(region: Region, node: fx.Node) -> None:
    """An op on elements, with others of the same rows, or that all rows share."""
    found = [source for source in node.all_input_nodes if source in region.layouts]
    shape, layouts = _shape(node), {region.layout_of(source) for source in found}
    layout = region.layout_of(_args(node)[0]) if len(layouts) > 1 else region.layouts[found[0]]
    if len(layouts) > 1 and not (node.target in _KEEP_ZERO and _padded_first(region, node)):
        raise NotByChunksError(f"{named(node)} reads different rows of it")
    if layout.state == "padded" and node.target not in (*_KEEP_ZERO, *_ADDS):
        raise NotByChunksError(f"{named(node)} is not zero where its input is")
    if any(
        len(_shape(source)) != len(shape) or _shape(source)[: layout.dims] != shape[: layout.dims]
        for source in found
    ):
        raise NotByChunksError(f"{named(node)} repeats its rows")

    def beside(source: fx.Node) -> fx.Node:
        return region.made[source] if source in region.made else _beside(region, source, shape, layout, node)

    args: Any = fx.map_arg(node.args, beside)
    kwargs: Any = fx.map_arg(node.kwargs, beside)
    region.write(node, args, layout, kwargs)


def _padded_first(region: Region, node: fx.Node) -> bool:
    """Whether zeros beside the chosen rows are multiplied by what all rows have."""
    first, *others = (each for each in node.args if isinstance(each, fx.Node))
    padded = region.layouts.get(first)
    return padded is not None and padded.state == "padded" and all(
        replace(padded, state="all") == region.layouts[each] for each in others if each in region.layouts
    )


def _beside(
    region: Region, source: fx.Node, shape: tuple[int, ...], layout: RowLayout, node: fx.Node
) -> fx.Node:
    """A tensor that is not of the region, beside one of this shape that is."""
    own = _shape(source)
    if layout.state == "padded" and node.target in _ADDS:
        raise NotByChunksError(f"{named(node)} is not zero where its input is")
    if (shared := _shared(region, source, len(shape) - layout.dims)) is not None:
        return shared
    if len(own) != len(shape) or own[: layout.dims] != shape[: layout.dims]:
        raise NotByChunksError(f"{named(node)} reads {source.name}, which has other rows")
    return region.input(source, layout)


def _shared(region: Region, source: fx.Node, rest: int) -> fx.Node | None:
    """One row for all rows of a tensor that is one repeated, or made of such: it is not made whole.

    ``rest``: the dimensions of a row.
    """
    own, target = _shape(source), source.target
    leading, row = own[: max(0, len(own) - rest)], own[max(0, len(own) - rest) :]
    if set(leading) <= {1}:
        made = region.input(source)
        return region.body.call_function(ATEN.view.default, (made, list(row))) if leading else made
    if target is ATEN.expand.default or (target in _SAME and _ends_alike(source, rest)):
        return _shared(region, _args(source)[0], rest)
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not source.kwargs:
        parts = {each: _shared(region, each, rest) for each in source.all_input_nodes}
        if parts and None not in parts.values():
            args: Any = fx.map_arg(source.args, parts.__getitem__)
            return region.body.call_function(target, args)
    return None


def _ends_alike(view: fx.Node, rest: int) -> bool:
    """Whether the last dimensions of a view are those of what it is a view of."""
    own, other = _shape(view), _shape(_args(view)[0])
    return len(other) >= rest and own[len(own) - rest :] == other[len(other) - rest :]


LOSSES: Final = (
    *(ATEN._log_softmax.default, ATEN._log_softmax_backward_data.default),
    *(ATEN.nll_loss_forward.default, ATEN.nll_loss_backward.default),
)
"""What a compiler must not decompose, for losses to be found."""

_RULES: Final[tuple[tuple[Any, Callable[[Region, fx.Node], None]], ...]] = (
    (_SAME, _same),
    ((ATEN._to_copy.default, CONVERT), _converted),
    ((ATEN.unsqueeze.default,), _unsqueezed),
    ((ATEN.expand.default,), _expanded),
    ((ATEN.t.default, ATEN.permute.default), _turned),
    ((ATEN.slice.Tensor,), _sliced),
    ((ATEN.slice_backward.default, ATEN.slice_scatter.default), _slice_backward),
    ((ATEN.mm.default,), _multiplied),
    ((ATEN.addmm.default, ATEN.bmm.default), _another_product),
    ((ATEN.nll_loss_forward.default,), _loss),
    ((ATEN.nll_loss_backward.default,), _loss_backward),
    (_DIMS, _along),
    ((ATEN.sum.default, ATEN.mean.default), _sum_of_all),
)

"""The part of a joint graph between the input of a last product and a loss, and back, that goes row by row.

:func:`find_region` follows the logits from their product through everything that reads them. Each call there
works on rows alone, and is written for a chunk of them into a *body*; or it sums over rows, or multiplies by
rows, and gives a result of the region. Anything else is refused, with a reason.

A tensor of the region has leading dimensions that count rows, ``(batch, length, …)`` or ``(rows, …)``; in the
body it has one. A slice of leading dimensions (labels are shifted) chooses rows: in the body all tensors have
the chosen ones alone, and its backward puts zeros into the places of the others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.tracing.by_chunks import PRODUCT, ROWS, SUM
from hybridremat.graph.tracing.fx_nodes import slice_arguments

ATEN: Final = torch.ops.aten
_PRODUCTS: Final = (ATEN.mm.default, ATEN.addmm.default)
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
    ATEN.sum.dim_IntList: 1,
    ATEN.mean.dim: 1,
    ATEN.squeeze.dim: 1,
    ATEN.squeeze.dims: 1,
}
_LINEAR: Final[dict[str, tuple[int, ...]]] = {  # ops that are linear in an argument, and which ones
    **dict.fromkeys(("mul",), (0, 1)),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "detach", "alias", "clone", "_to_copy"), (0,)),
    **dict.fromkeys(("expand", "unsqueeze", "squeeze", "t", "slice_backward", "sum", "mean", "div"), (0,)),
    **dict.fromkeys(("nll_loss_backward", "_log_softmax_backward_data", "_softmax_backward_data"), (0,)),
    **dict.fromkeys(("tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward", "neg"), (0,)),
    "threshold_backward": (0,),
}
_ADDS: Final = ("add", "sub")
_KEEP_ZERO: Final = ("mul", "div", "neg", "_to_copy", "tanh_backward", "sigmoid_backward")


class NotByChunksError(Exception):
    """Why a product's loss cannot be made by chunks of rows."""


@dataclass(frozen=True)
class Choice:
    """Rows ``start`` to ``end`` along one of the dimensions ``lead`` that count rows."""

    lead: tuple[int, ...]
    dim: int
    start: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dimensions of what is chosen."""
        return *self.lead[: self.dim], self.end - self.start, *self.lead[self.dim + 1 :]


@dataclass(frozen=True)
class Rows:
    """How a tensor counts rows.

    Attributes
    ----------
    lead
        How many leading dimensions count them.
    state
        ``"all"`` rows, the ``"chosen"`` ones, or all with zeros beside the chosen ones (``"padded"``).
    turned
        A matrix with rows as its second dimension.
    """

    lead: int = 1
    state: str = "all"
    turned: bool = False


@dataclass(frozen=True)
class Given:
    """A tensor that the region is given: with rows, or whole."""

    node: fx.Node
    rows: Rows | None


@dataclass(frozen=True)
class Result:
    """What the region gives: ``node`` of the joint graph, made from what the body returns at ``outputs``.

    ``scale``: what a mean divides the sum by, a number or a node.
    """

    node: fx.Node
    kind: str
    outputs: tuple[fx.Node, ...]
    rows: Rows
    scale: fx.Node | int | None = None


@dataclass
class Region:
    """A region, as far as it has been followed."""

    product: fx.Node
    length: int
    body: fx.Graph = field(default_factory=fx.Graph)
    rows: dict[fx.Node, Rows] = field(default_factory=dict)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    given: dict[Given, fx.Node] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    counts: dict[fx.Node, fx.Node] = field(default_factory=dict)  # total weight of a loss → the loss
    losses: dict[fx.Node, fx.Node] = field(default_factory=dict)
    choice: Choice | None = None
    sums_all: fx.Node | None = None
    products: list[fx.Node] = field(default_factory=list)


def find_region(product: fx.Node) -> Region:
    """The region of a product with a matrix of weights, of two dimensions.

    Raises
    ------
    NotByChunksError
        With what cannot be done by rows.
    """
    region = Region(product, len(product.meta["val"]), products=[product])
    _start(region)
    node = product.next
    while node.op != "root":
        if any(source in region.rows for source in node.all_input_nodes):
            _follow(region, node)
        node = node.next
    if region.choice is not None and region.sums_all is not None:
        raise NotByChunksError(f"{region.sums_all.name} sums over rows that the loss leaves out")
    if not region.results:
        raise NotByChunksError("nothing is made of it")
    return region


def _start(region: Region) -> None:
    product = region.product
    *bias, given, weight = _args(product)
    if product.kwargs:
        raise NotByChunksError("it scales its factors")
    arguments = [_whole(region, each) for each in bias]
    arguments += [_row_input(region, given, Rows()), _whole(region, weight)]
    _write(region, product, tuple(arguments), Rows())


def _whole(region: Region, source: Any) -> fx.Node:
    return _given(region, Given(source, None))


def _row_input(region: Region, source: Any, rows: Rows) -> fx.Node:
    return _given(region, Given(source, rows))


def _given(region: Region, given: Given) -> fx.Node:
    if given not in region.given:
        first = next(iter(region.body.nodes), None)
        with region.body.inserting_before(first):
            region.given[given] = region.body.placeholder(f"given_{len(region.given)}")
    return region.given[given]


def _write(region: Region, node: fx.Node, args: tuple[Any, ...], rows: Rows, **kwargs: Any) -> None:
    """Write a call of the body."""
    target: Any = node.target
    region.made[node] = region.body.call_function(target, args, kwargs)
    region.rows[node] = rows


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", str(node.target))


def _follow(region: Region, node: fx.Node) -> None:
    """Go on with a node that reads the region."""
    target = node.target
    if target is operator.getitem:
        return _item(region, node)
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        raise NotByChunksError(f"{node.name} reads it")
    for known, follow in _RULES:
        if target in known:
            return follow(region, node)
    if torch.Tag.pointwise in target.tags and not target._schema.is_mutable:
        return _pointwise(region, node)
    raise NotByChunksError(f"{node.name} ({target}) is not known to go row by row")


def _rows_of(region: Region, node: Any) -> Rows:
    rows = region.rows.get(node)
    if rows is None or rows.turned:
        raise NotByChunksError(f"{node} is read in another order")
    return rows


def _same(region: Region, node: fx.Node) -> None:
    """A view or a copy: leading dimensions may be other ones."""
    source: Any = _args(node)[0]
    rows = region.rows[source]
    if rows.turned:
        if _shape(node) != _shape(source):
            raise NotByChunksError(f"{node.name} is another view of it")
    else:
        rows = replace(rows, lead=_lead(region, _shape(node), _shape(source)[rows.lead :], rows, node))
    region.made[node], region.rows[node] = region.made[source], rows


def _lead(
    region: Region, shape: tuple[int, ...], rest: tuple[int, ...], rows: Rows, node: fx.Node
) -> int:
    """How many leading dimensions of a shape count rows."""
    lead = len(shape) - len(rest)
    if lead < 1 or shape[lead:] != rest or prod(shape[:lead]) != _count(region, rows):
        raise NotByChunksError(f"{node.name} is another view of it")
    return lead


def _count(region: Region, rows: Rows) -> int:
    return prod(region.choice.shape) if rows.state == "chosen" and region.choice else region.length


def _converted(region: Region, node: fx.Node) -> None:
    source: Any = _args(node)[0]
    rows = region.rows[source]
    if node.meta["val"].device != source.meta["val"].device:
        raise NotByChunksError(f"{node.name} moves it to another device")
    kwargs = {name: item for name, item in node.kwargs.items() if name != "memory_format"}
    return _write(region, node, (region.made[source],), rows, **kwargs)


def _unsqueezed(region: Region, node: fx.Node) -> None:
    source, dim = _args(node)
    rows = _rows_of(region, source)
    place = _place(dim, len(_shape(node)), rows, node)
    _write(region, node, (region.made[source], place), rows)


def _place(dim: Any, dims: int, rows: Rows, node: fx.Node) -> int:
    """A dimension of the joint graph as one of the body."""
    place = dim % dims
    if place < rows.lead:
        raise NotByChunksError(f"{node.name} goes along rows")
    return int(place - rows.lead + 1)


def _expanded(region: Region, node: fx.Node) -> None:
    source: Any = _args(node)[0]
    rows, shape = _rows_of(region, source), _shape(node)
    if shape[: rows.lead] != _shape(source)[: rows.lead] or len(shape) != len(_shape(source)):
        raise NotByChunksError(f"{node.name} repeats its rows")
    _write(region, node, (region.made[source], [-1, *shape[rows.lead :]]), rows)


def _turned(region: Region, node: fx.Node) -> None:
    source: Any = _args(node)[0]
    rows = region.rows[source]
    if rows.lead != 1 or len(_shape(node)) != 2:
        raise NotByChunksError(f"{node.name} changes the order of its dimensions")
    region.made[node], region.rows[node] = region.made[source], replace(rows, turned=not rows.turned)


def _sliced(region: Region, node: fx.Node) -> None:
    """A slice of rows chooses them; any other slice works on each row."""
    source: Any = _args(node)[0]
    rows, shape = _rows_of(region, source), _shape(source)
    dim, start, end, step = slice_arguments(node)
    dim %= len(shape)
    if dim >= rows.lead:
        return _write(region, node, (region.made[source], dim - rows.lead + 1, start, end, step), rows)
    first, last, _ = slice(start, end).indices(shape[dim])
    if (first, last) == (0, shape[dim]) and step == 1:
        region.made[node], region.rows[node] = region.made[source], rows
        return None
    choice = Choice(shape[: rows.lead], dim, first, last)
    if rows.state != "all" or step != 1 or region.choice not in (None, choice):
        raise NotByChunksError(f"{node.name} chooses other rows")
    region.choice = choice
    region.made[node], region.rows[node] = region.made[source], replace(rows, state="chosen")
    return None


def _slice_backward(region: Region, node: fx.Node) -> None:
    source, size, dim, start, end, step = _args(node)
    rows = _rows_of(region, source)
    dim %= len(size)
    if dim >= rows.lead:
        raise NotByChunksError(f"{node.name} ({node.target}) is not known to go row by row")
    if list(size) == list(_shape(source)):
        region.made[node], region.rows[node] = region.made[source], rows
        return
    first, last, _ = slice(start, end).indices(size[dim])
    choice = Choice(tuple(size[: rows.lead]), dim, first, last)
    if rows.state != "chosen" or step != 1 or choice != region.choice:
        raise NotByChunksError(f"{node.name} puts rows into other places")
    region.made[node], region.rows[node] = region.made[source], replace(rows, state="padded")


def _multiplied(region: Region, node: fx.Node) -> None:
    """The gradient of the product's input, or of its weight."""
    left, right = _args(node)
    rows, other = region.rows.get(left), region.rows.get(right)
    region.products.append(node)
    if node.kwargs or (rows is not None and other is not None):
        raise NotByChunksError(f"{node.name} multiplies it by itself")
    if rows is not None and not rows.turned:
        if rows.state == "chosen":
            raise NotByChunksError(f"{node.name} is another product")
        made = region.body.call_function(ATEN.mm.default, (region.made[left], _whole(region, right)))
        return _result(region, Result(node, ROWS, (made,), rows))
    if rows is not None:
        factors = region.made[left], _row_input(region, right, _factor(rows))
        turned = factors[0]
    elif other is not None and not other.turned and _turns(left):
        rows = other
        factors = _row_input(region, _args(left)[0], _factor(rows)), region.made[right]
        turned = factors[0]
    else:
        raise NotByChunksError(f"{node.name} is another product")
    if rows.state == "all":
        region.sums_all = node
    made = region.body.call_function(ATEN.t.default, (turned,))
    return _result(region, Result(node, PRODUCT, (made, factors[1]), rows))


def _another_product(_: Region, node: fx.Node) -> None:
    raise NotByChunksError(f"{node.name} is another product")


def _turns(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is ATEN.t.default


def _factor(rows: Rows) -> Rows:
    """How the other factor counts rows: of zeros it needs none."""
    return Rows(state="chosen" if rows.state == "chosen" else "all")


def _result(region: Region, result: Result) -> None:
    region.results.append(result)


def _loss(region: Region, node: fx.Node) -> None:
    """``nll_loss_forward``: its sum; a mean is divided by the weight of all rows, which targets tell."""
    given, target, weight, reduction, ignored = _args(node)
    rows = _rows_of(region, given)
    if rows.lead != 1 or target in region.rows:
        raise NotByChunksError(f"{node.name} is not a loss of rows")
    weights = _whole(region, weight) if weight is not None else None
    call = (region.made[given], _row_input(region, target, rows), weights, 2 if reduction else 0, ignored)
    region.losses[node] = region.body.call_function(ATEN.nll_loss_forward.default, call)
    region.rows[node] = rows


def _item(region: Region, node: fx.Node) -> None:
    loss, item = _args(node)
    if loss not in region.losses:
        raise NotByChunksError(f"{node.name} reads it")
    if item == 1:
        region.counts[node] = loss
        return
    made = region.body.call_function(operator.getitem, (region.losses[loss], 0))
    rows = region.rows[loss]
    if _args(loss)[3] == 0:
        region.made[node], region.rows[node] = made, rows
        return
    if rows.state == "all":
        region.sums_all = node
    _result(region, Result(node, SUM, (made,), rows, loss if _args(loss)[3] == 1 else None))


def _loss_backward(region: Region, node: fx.Node) -> None:
    arrived, given, target, weight, reduction, ignored, total = _args(node)
    rows = _rows_of(region, given)
    if rows.lead != 1:
        raise NotByChunksError(f"{node.name} is not a loss of rows")
    if arrived in region.rows:
        first = region.made[arrived]
    else:
        first = _whole(region, arrived) if reduction else _row_input(region, arrived, rows)
    weights = _whole(region, weight) if weight is not None else None
    rest = (_row_input(region, target, rows), weights, reduction, ignored, _whole(region, total))
    _write(region, node, (first, region.made[given], *rest), rows)


def _along(region: Region, node: fx.Node) -> None:
    """An op along dimensions of each row; a sum along all that count rows is a result."""
    position = _DIMS[node.target]
    dims: Any = _args(node)[position]
    sources = [source for source in _args(node)[:position] if isinstance(source, fx.Node)]
    rows = [_rows_of(region, source) for source in sources if source in region.rows]
    if len(rows) != len(sources) or len(set(rows)) != 1:
        raise NotByChunksError(f"{node.name} reads it beside something else")
    ndim = len(_shape(sources[0]))
    named = [dim % ndim for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
    if node.target is ATEN.sum.dim_IntList and set(range(rows[0].lead)) <= set(named):
        return _sum(region, node, rows[0], named)
    places = [_place(dim, ndim, rows[0], node) for dim in named]
    changed = places if isinstance(dims, (list, tuple)) else places[0]
    args: list[Any] = [region.made[each] if each in sources else each for each in _args(node)]
    args[position] = changed
    return _write(region, node, tuple(args), rows[0], **node.kwargs)


def _sum(region: Region, node: fx.Node, rows: Rows, named: Sequence[int] = ()) -> None:
    """A sum over all rows, and over other dimensions as well if these are named, or none is."""
    source: Any = _args(node)[0]
    if rows.state == "all":
        region.sums_all = node
    rest = [dim - rows.lead + 1 for dim in named if dim >= rows.lead]
    places = [0, *rest] if named else list(range(len(_shape(source)) - rows.lead + 1))
    made = region.body.call_function(ATEN.sum.dim_IntList, (region.made[source], places), dict(node.kwargs))
    scale = prod(_shape(source)) if node.target is ATEN.mean.default else None
    _result(region, Result(node, SUM, (made,), rows, scale))


def _sum_of_all(region: Region, node: fx.Node) -> None:
    _sum(region, node, _rows_of(region, _args(node)[0]))


def _pointwise(region: Region, node: fx.Node) -> None:
    """An op on elements, with others of the same rows, or that all rows share."""
    found = [source for source in node.all_input_nodes if source in region.rows]
    shape, kinds = _shape(node), {_rows_of(region, source) for source in found}
    if len(kinds) > 1 and not (_name(node) in _KEEP_ZERO and _padded_first(region, node)):
        raise NotByChunksError(f"{node.name} reads different rows of it")
    rows = region.rows[found[0]] if len(kinds) == 1 else region.rows[_args(node)[0]]
    if rows.state == "padded" and _name(node) not in (*_KEEP_ZERO, *_ADDS):
        raise NotByChunksError(f"{node.name} is not zero where its input is")
    if any(len(_shape(source)) != len(shape) for source in found):
        raise NotByChunksError(f"{node.name} repeats its rows")

    def argument(source: fx.Node) -> fx.Node:
        return region.made[source] if source in region.rows else _beside(region, source, shape, rows, node)

    args: Any = fx.map_arg(_args(node), argument)
    kwargs: Any = fx.map_arg(node.kwargs, argument)
    _write(region, node, args, rows, **kwargs)


def _padded_first(region: Region, node: fx.Node) -> bool:
    """Whether zeros beside the chosen rows are multiplied by what all rows have."""
    first, *others = (each for each in _args(node) if isinstance(each, fx.Node))
    return region.rows[first].state == "padded" and all(
        region.rows[each].state == "all" and region.rows[each].lead == region.rows[first].lead
        for each in others
        if each in region.rows
    )


def _beside(
    region: Region, source: fx.Node, shape: tuple[int, ...], rows: Rows, node: fx.Node
) -> fx.Node:
    """A tensor that is not of the region, beside one of this shape that is."""
    own = _shape(source)
    if len(own) <= len(shape) - rows.lead:
        return _whole(region, source)
    if len(own) == len(shape) and own[: rows.lead] == shape[: rows.lead]:
        if rows.state == "padded" and _name(node) in _ADDS:
            raise NotByChunksError(f"{node.name} is not zero where its input is")
        return _row_input(region, source, rows)
    raise NotByChunksError(f"{node.name} reads {source.name}, which has other rows")


_RULES: Final[tuple[tuple[Any, Callable[[Region, fx.Node], None]], ...]] = (
    (_SAME, _same),
    ((ATEN._to_copy.default,), _converted),
    ((ATEN.unsqueeze.default,), _unsqueezed),
    ((ATEN.expand.default,), _expanded),
    ((ATEN.t.default,), _turned),
    ((ATEN.slice.Tensor,), _sliced),
    ((ATEN.slice_backward.default,), _slice_backward),
    ((ATEN.mm.default,), _multiplied),
    ((ATEN.addmm.default, ATEN.bmm.default), _another_product),
    ((ATEN.nll_loss_forward.default,), _loss),
    ((ATEN.nll_loss_backward.default,), _loss_backward),
    (_DIMS, _along),
    ((ATEN.sum.default, ATEN.mean.default), _sum_of_all),
)


def is_linear(node: fx.Node, changing: Callable[[fx.Node], bool]) -> bool:
    """Whether what a call gives is in proportion to those of its inputs that are ``changing``."""
    name = _name(node)
    places = [place for place, each in enumerate(_args(node)) if isinstance(each, fx.Node) and changing(each)]
    if name in _ADDS:
        return places == [0, 1]
    if name == "masked_fill":
        return places == [0] and bool(_args(node)[2] == 0)
    if name == "mm":
        return len(places) == 1
    return len(places) == 1 and places[0] in _LINEAR.get(name, ())

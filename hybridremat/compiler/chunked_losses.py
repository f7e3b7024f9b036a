"""The part of the checker that holds a joint graph with losses by chunks of rows against the one without.

Both are read into *row terms*: terms as the checker's, but without what cutting rows into chunks changes.
Views and copies are what they are made of; dimensions count from the last one; a sum over rows is named by
what is summed, whether in one go, by a product, or chunk by chunk, and in whatever precision. A slice of
rows stands beside a term as its *state*, since ops that go row by row can be run before or after it; so do
the zeros that its backward puts in. A call by chunks has the terms of its body, in which one stands for the
gradient that arrives: what the call gives is multiplied by that later.

A row that is repeated is that row, in a sum as well. That gradients are in proportion to what arrives is not
proven here (:func:`hybridremat.graph.rewrites.linearity.is_linear` is trusted), nor is the order in which
sums round.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from hybridremat.compiler.buffer_hazards import check_error
from hybridremat.graph.private_torch import OpOverload, detect_fake_mode
from hybridremat.graph.rewrites.by_chunks import PRODUCT, loss_by_chunks
from hybridremat.graph.tracing.fx_nodes import (
    argument,
    is_mutation,
    is_random,
    joint_outputs,
    put_back,
    slice_arguments,
)

_ATEN: Final = torch.ops.aten
_SAME: Final = (
    *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default),
    *(_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default),
)
_ONES: Final = _ATEN.ones.default

State = tuple[Hashable, ...]
_Found = Mapping[fx.Node, Any]


@dataclass(frozen=True)
class _Read:
    """What a node computes: a term, which rows of it, whether it is turned, whether a sum over rows."""

    term: Hashable
    state: State = ()
    turned: bool = False
    summed: bool = False


def refuse_other_losses(whole: fx.GraphModule, chunked: fx.GraphModule) -> None:
    """Raise PlanError unless two joint graphs compute the same but for the rounding of sums over rows."""
    numbers: dict[Hashable, int] = {}
    put = filter(None, map(put_back, whole.graph.nodes))
    places = frozenset(_places(size, dim, start, end) for _, size, dim, start, end, _ in put)
    first, second = _Reader(numbers, places), _Reader(numbers, places)
    for reader, module in ((first, whole), (second, chunked)):
        for node in module.graph.nodes:
            if node.op != "output":
                reader.read(module, node)
    if first.outputs(whole) != second.outputs(chunked) or first.updates != second.updates:
        raise check_error("a loss by chunks of rows does not compute the same")


class _Reader:
    """Reads a graph into row terms, with numbers that two graphs share.

    ``put_back``: the rows that gradients are put back into. Slices of these give states.
    """

    def __init__(self, numbers: dict[Hashable, int], put_back: frozenset[State]) -> None:
        self.numbers, self.put_back = numbers, put_back
        self.found: dict[fx.Node, Any] = {}
        self.arrived: dict[fx.Node, Any] = {}  # where one stands for the gradient that arrives
        self.updates: list[Hashable] = []
        self.drawn = 0
        self.tangents: list[fx.Node] = []

    def outputs(self, module: fx.GraphModule) -> list[Any]:
        return [self.found[each] if isinstance(each, fx.Node) else None for each in joint_outputs(module)]

    def read(self, module: fx.GraphModule, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.found[node] = _Read(self._number("input", node.name))
            self.tangents += [node] * node.name.startswith("tangents_")
            return
        if node.op == "get_attr":
            self.found[node] = _Read(self._number("attribute", str(node.target)))
            return
        self.found[node] = self._value(module, node, self.found)
        if node.target is _ONES and _args(node) == ([],) and len(self.tangents) == 1:
            self.arrived[node] = self.found[self.tangents[0]]
        elif any(each in self.arrived for each in node.all_input_nodes):
            self.arrived[node] = self._value(module, node, {**self.found, **self.arrived})
        if is_mutation(node):
            self.updates.append(self.found[node])

    def _number(self, *key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _value(self, module: fx.GraphModule, node: fx.Node, found: _Found) -> Any:
        """What a call gives: one term, or a list of what its items are."""
        if node.target is loss_by_chunks:
            return self._chunks(module, node)
        if node.target in _RULES:
            return _RULES[node.target](self, node, found)
        if node.target in _SAME:
            return found[_args(node)[0]]
        return self._call(node, found)

    def _turned(self, node: fx.Node, found: _Found) -> Any:
        if _args(node)[1:] not in ((), ([1, 0],)):
            return self._call(node, found)
        source = found[_args(node)[0]]
        return replace(source, turned=not source.turned)

    def _converted(self, node: fx.Node, found: _Found) -> Any:
        """Of a sum over rows the precision does not matter."""
        source = found[_args(node)[0]]
        return source if source.summed else self._call(node, found)

    def _times(self, node: fx.Node, found: _Found) -> Any:
        gradient = self._arriving(node, found)
        return self._call(node, found) if gradient is None else gradient

    def _mean(self, node: fx.Node, found: _Found) -> Any:
        """The mean over all rows: the sum, divided by how many numbers are added up."""
        kept = _kept_by_sum(node)
        if kept is None:
            return self._call(node, found)
        shape = _args(node)[0].meta["val"].shape
        return self._divided(self._sum(node, found, kept), shape[: len(shape) - kept].numel())

    def _expanded(self, node: fx.Node, found: _Found) -> Any:
        """One number that is repeated is that number, and so is one row."""
        source = _args(node)[0]
        shape, other = node.meta["val"].shape, source.meta["val"].shape
        repeated = other.numel() == 1 or shape[-1:] == other[-1:]
        return found[source] if repeated else self._call(node, found)

    def _quotient(self, node: fx.Node, found: _Found) -> Any:
        source, by = _args(node)
        if not isinstance(source, fx.Node) or not found[source].summed:
            return self._call(node, found)
        return self._divided(found[source], found[by].term if isinstance(by, fx.Node) else by)

    def _summed(self, node: fx.Node, found: _Found) -> Any:
        kept = _kept_by_sum(node)
        return self._call(node, found) if kept is None else self._sum(node, found, kept)

    def _arriving(self, node: fx.Node, found: _Found) -> Any:
        """What a call by chunks gives, where it is multiplied by the gradient that arrives."""
        item, gradient = _args(node)
        chunked = (
            isinstance(item, fx.Node)
            and item.target is operator.getitem
            and _args(item)[0].target is loss_by_chunks
        )
        return found[item] if chunked and [gradient] == self.tangents else None

    def _divided(self, source: _Read, by: Hashable) -> _Read:
        return _Read(self._number("divided", source.term, str(by)), summed=True)

    def _settled(self, read: _Read) -> Hashable:
        """A term that stands for its rows, too."""
        return ("rows", read.term, read.state, read.turned) if read.state else (read.term, read.turned)

    def _call(self, node: fx.Node, found: _Found) -> _Read:
        """A call that goes row by row: its rows are those of what it reads first; others stand for theirs."""
        reads = [found[each] for each in node.all_input_nodes]
        state = next((each.state for each in reads if isinstance(each, _Read) and each.state), ())
        draw = [self.drawn] if is_random(node) else []
        self.drawn += len(draw)

        def frozen(item: Any) -> Hashable:
            if isinstance(item, fx.Node):
                read = found[item]
                if not isinstance(read, _Read):
                    return tuple(map(self._settled, read))
                return (read.term, read.turned) if read.state == state else self._settled(read)
            if isinstance(item, (list, tuple)):
                return tuple(map(frozen, item))
            return repr(item)

        args = tuple(frozen(each) for each in _counted_from_last(node))
        kwargs = tuple((name, frozen(each)) for name, each in sorted(node.kwargs.items()))
        return _Read(self._number(str(node.target), args, kwargs, *draw), state)

    def _product(self, node: fx.Node, found: _Found) -> _Read:
        """A product: of rows with a matrix, or a sum of products of rows."""
        *bias, left, right = (found[each] for each in node.all_input_nodes)
        if len(node.all_input_nodes) != len(_args(node)) or not (left.turned or right.state):
            return self._call(node, found)
        return self._contracted(left, right, *bias)

    def _contracted(self, left: _Read, right: _Read, *bias: _Read) -> _Read:
        """A sum over rows of products; zeros need no other factor."""
        states = {("rows", *each.state[1:]) for each in (left, right) if each.state}
        if len(states) > 1:
            raise check_error("a product sums over rows that are not those of its other factor")
        parts = [(each.term, each.turned) for each in (left, right, *bias)]
        return _Read(self._number("product", *parts, *states), summed=True)

    def _sum(self, node: fx.Node, found: _Found, kept: int) -> _Read:
        """A sum over all dimensions but the last ``kept`` ones."""
        source: _Read = found[_args(node)[0]]
        dtype = str(node.kwargs.get("dtype"))
        return _Read(self._number("sum", source.term, source.state[1:], kept, dtype), summed=True)

    def _slice(self, node: fx.Node, found: _Found) -> _Read:
        source: Any = _args(node)[0]
        dim, start, end, step = slice_arguments(node)
        places = _places(list(source.meta["val"].shape), dim, start, end)
        read: _Read = found[source]
        if (step, *places[1:]) == (1, places[1], 0, places[1]):  # all of it
            return read
        if step != 1 or read.state or places not in self.put_back:
            return self._call(node, found)
        return replace(read, state=("chosen", *places))

    def _slice_backward(self, node: fx.Node, found: _Found) -> _Read:
        put = put_back(node)
        if put is None:
            return self._call(node, found)
        source, size, dim, start, end, _ = put
        places = _places(size, dim, start, end)
        read: _Read = found[source]
        if places[1:] == (places[1], 0, places[1]):
            return read
        if read.state != ("chosen", *places):
            return self._call(node, found)
        return replace(read, state=("padded", *places))

    def _loss(self, node: fx.Node, found: _Found) -> list[_Read]:
        """A loss over classes as a sum, and the weight of all rows, by which a mean is divided."""
        given, target, weight, reduction, ignored = _args(node)
        rows = [self._settled(found[each]) for each in (given, target)]
        weights = found[weight] if isinstance(weight, fx.Node) else None
        total = self._total(found[target], weights, ignored, node)
        summed = _Read(self._number("loss", *rows, weights, str(ignored), bool(reduction)), summed=True)
        return [self._divided(summed, total.term) if reduction == 1 else summed, total]

    def _total(self, target: _Read, weights: _Read | None, ignored: Any, node: fx.Node) -> _Read:
        """The weight of all rows, as the terms of the calls that compute it."""

        def call(op: OpOverload, *args: Hashable, **kwargs: Hashable) -> tuple[int, bool]:
            frozen = tuple((name, repr(each)) for name, each in sorted(kwargs.items()))
            return self._number(str(op), args, frozen), False

        kept = call(_ATEN.ne.Scalar, (target.term, target.turned), repr(ignored))
        if weights is None:
            return _Read(self._number("sum", kept[0], target.state[1:], 0, "None"), summed=True)
        safe = call(_ATEN.mul.Tensor, (target.term, target.turned), kept)
        taken = call(_ATEN.index_select.default, (weights.term, weights.turned), "-1", safe)
        weighed = call(_ATEN.where.ScalarOther, kept, taken, "0")
        return _Read(self._number("sum", weighed[0], target.state[1:], 0, "None"), summed=True)

    def _item(self, node: fx.Node, found: _Found) -> _Read:
        source, index = _args(node)
        read: Any = found[source]
        if isinstance(read, list):
            item: _Read = read[index]
            return item
        return _Read(self._number("item", read.term, str(index)), read.state)

    def _chunks(self, module: fx.GraphModule, node: fx.Node) -> list[_Read]:
        """What a call by chunks gives: the terms of its body, for what it is given."""
        name, kinds, (size, _), rows, whole = _args(node)
        body = module.get_submodule(name.target)
        assert isinstance(body, fx.GraphModule)
        given: list[fx.Node] = [*rows, *whole]
        _require_rows(node, [each.meta["val"] for each in rows], size)
        fakes: list[Any] = [each.meta["val"][:size] for each in rows]
        fakes += [each.meta["val"] for each in whole]
        mode = detect_fake_mode(fakes)
        assert mode is not None
        try:
            FakeTensorProp(body, mode).propagate_dont_convert_inputs(*fakes)
        except Exception as error:  # whatever an op raises for what it does not take
            raise check_error(f"the body of {node.name} does not run on what it is given: {error}") from error
        inner = _Reader(self.numbers, self.put_back)
        placeholders = body.graph.find_nodes(op="placeholder")
        for place, source in zip(placeholders, given, strict=True):
            inner.found[place] = self.arrived.get(source, self.found[source])
        for each in body.graph.nodes:
            if each.op == "call_function":
                inner.found[each] = inner._value(body, each, inner.found)
        return list(_by_kind(inner, kinds, joint_outputs(body)))


_RULES: Final[dict[object, Callable[[_Reader, fx.Node, _Found], Any]]] = {
    operator.getitem: _Reader._item,
    _ATEN.t.default: _Reader._turned,
    _ATEN.permute.default: _Reader._turned,
    _ATEN._to_copy.default: _Reader._converted,
    torch.ops.prims.convert_element_type.default: _Reader._converted,
    _ATEN.mul.Tensor: _Reader._times,
    _ATEN.div.Tensor: _Reader._quotient,
    _ATEN.slice.Tensor: _Reader._slice,
    _ATEN.slice_backward.default: _Reader._slice_backward,
    _ATEN.slice_scatter.default: _Reader._slice_backward,
    _ATEN.nll_loss_forward.default: _Reader._loss,
    _ATEN.mean.default: _Reader._mean,
    _ATEN.mean.dim: _Reader._mean,
    _ATEN.expand.default: _Reader._expanded,
    _ATEN.sum.default: _Reader._summed,
    _ATEN.sum.dim_IntList: _Reader._summed,
    _ATEN.mm.default: _Reader._product,
    _ATEN.addmm.default: _Reader._product,
}


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _by_kind(inner: _Reader, kinds: Iterable[str], outputs: list[Any]) -> Iterable[_Read]:
    left = [inner.found[each] for each in outputs]
    for kind in kinds:
        first = left.pop(0)
        yield inner._contracted(first, left.pop(0)) if kind == PRODUCT else first


def _require_rows(node: fx.Node, rows: list[torch.Tensor], size: Any) -> None:
    if size < 1 or len({len(each) for each in rows}) != 1:
        raise check_error(f"{node.name} takes chunks of tensors that differ in their rows")


def _places(size: list[int], dim: int, start: int | None, end: int | None) -> State:
    """The same for rows in one dimension or several: what is before, how many there are, which are taken."""
    dim %= len(size)
    first, last, _ = slice(start, end).indices(size[dim])
    return torch.Size(size[:dim]).numel(), size[dim], first, last


def _kept_by_sum(node: fx.Node) -> int | None:
    """How many last dimensions a sum or mean over all others keeps; None if it keeps another one."""
    count = _args(node)[0].meta["val"].dim()
    dims = argument(node, "dim")
    named = {dim % count for dim in dims or ()} or set(range(count))
    return count - len(named) if named == set(range(len(named))) else None


def _counted_from_last(node: fx.Node) -> list[Any]:
    """A call's arguments, with dimensions counted from the last one, and of sizes the last one alone."""
    args: list[Any] = list(_args(node))
    if not isinstance(node.target, OpOverload) or not args or not isinstance(args[0], fx.Node):
        return args
    value = node.meta["val"] if node.target is _ATEN.unsqueeze.default else args[0].meta["val"]
    if not isinstance(value, torch.Tensor):
        return args
    for place, entry in enumerate(node.target._schema.arguments[: len(args)]):
        given = args[place]
        if entry.name in ("dim", "dims") and isinstance(given, int):
            args[place] = given if given < 0 else given - value.dim()
        elif entry.name in ("dim", "dims") and isinstance(given, (list, tuple)):
            args[place] = [each if each < 0 else each - value.dim() for each in given]
    if node.target is _ATEN.expand.default:
        args[1] = [node.meta["val"].shape[-1]] if node.meta["val"].dim() else []
    return args

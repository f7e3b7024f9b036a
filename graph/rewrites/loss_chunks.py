"""Let a loss over classes be made by chunks of rows, with the gradients of its last product.

The forward makes the loss and, for a gradient of one arriving at it, the gradients; the backward multiplies
them by what arrives. So no product is made twice, and no more than the logits of a chunk are alive. The bits
of the weight's gradient are others: its sum over rows is taken chunk by chunk.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import fx

from hybridremat.errors import ModelError
from hybridremat.graph.rewrites.by_chunks import ROWS, SUM, chunk_sizes, loss_by_chunks, sum_dtype
from hybridremat.graph.rewrites.linearity import is_linear
from hybridremat.graph.rewrites.loss_region import (
    Given,
    NotByChunksError,
    Region,
    Result,
    RowLayout,
    named,
)
from hybridremat.graph.rewrites.rewrite import Joint
from hybridremat.graph.rewrites.row_rules import ATEN, CONVERT, find_region
from hybridremat.graph.tracing.flops import FLOPS, node_flops
from hybridremat.graph.tracing.fx_nodes import fake_call, joint_outputs

logger = logging.getLogger(__name__)

_VIEWS: Final = (ATEN.t.default, ATEN.permute.default, ATEN.view.default, ATEN.detach.default)


def no_loss_in_any(count: int) -> ModelError:
    """The error for a step of so many graphs, in none of which a loss can be made by chunks."""
    return ModelError(
        f'rewrites="chunked" finds no loss that can be made by chunks of rows in any of the {count} graphs '
        "of this step. Logits and loss have to be in one graph, which hands out no logits: compute the loss "
        "with no break and no return between, or leave rewrites= out."
    )


def _no_loss(why: object) -> ModelError:
    return ModelError(
        f'rewrites="chunked" finds no loss that can be made by chunks of rows; {why}. Only the loss may read '
        'the logits, and that row by row: return only the loss (outputs="loss" drops the other outputs), or '
        'leave rewrites="chunked" out.'
    )


def _tangents(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.find_nodes(op="placeholder") if n.name.startswith("tangents_")]


def _after(roots: Iterable[fx.Node], module: fx.GraphModule) -> set[fx.Node]:
    """What is computed from any of the roots, these included."""
    found = set(roots)
    for node in module.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def products_of(joint: Joint) -> list[fx.Node]:
    """The products of the forward with more columns than their input has, the last one first."""
    backward = _after(_tangents(joint.module), joint.module)
    products = []
    for node in joint.module.graph.nodes:
        if node.target in (ATEN.mm.default, ATEN.addmm.default) and node not in backward:
            given: Any = node.args[-2]
            if node.meta["val"].shape[1] > given.meta["val"].shape[1]:
                products.append(node)
    if not products:
        raise _no_loss("no product of its forward (mm, addmm) has more columns than its input")
    return products[::-1]


def make_by_chunks(joint: Joint, products: Sequence[fx.Node]) -> None:
    """Rewrite the loss of every product that has one; ModelError if none has, with what the first lacks."""
    refused: list[str] = []
    for place, product in enumerate(products):
        try:
            _Rewriter(joint.module, product, joint.num_outputs).rewrite(place - len(refused))
        except NotByChunksError as reason:
            logger.info("%s is not made by chunks: %s", product, reason)
            refused.append(f"of the last product to try, {named(product)}: {reason}")
    if len(refused) == len(products):
        raise _no_loss(refused[0])


class _Rewriter:
    """Rewrites the loss of one product."""

    def __init__(self, module: fx.GraphModule, product: fx.Node, num_outputs: int) -> None:
        self.module, self.graph, self.product = module, module.graph, product
        self.backward = _after(_tangents(module), module)
        self.after = _after([product], module)
        for output in joint_outputs(module)[:num_outputs]:
            if output in self.after and output.meta["val"].numel() > 1:
                raise NotByChunksError(f"the step returns {output.name}, which is made of it")
        self.region: Region = find_region(product)
        self.order = {node: place for place, node in enumerate(self.graph.nodes)}
        self._require_results()
        self.scaled = self._scaled()
        self.tangent = self._only_tangent()
        self._require_linear()
        self.totals: dict[fx.Node, fx.Node] = {}  # of each loss
        self.copies: dict[fx.Node, fx.Node] = {}  # for a gradient of one in place of what arrives

    def rewrite(self, number: int) -> None:
        """Write the call, and what comes of it."""
        region = self.region
        first = [each.node for each in region.results if each.node not in self.backward]
        anchor = min((*first, *region.losses), key=self.order.__getitem__)
        self._hoist(anchor)
        with self.graph.inserting_before(anchor):
            self.totals = {loss: self._total(loss) for loss in region.losses}
            self.copies |= {count: self.totals[loss] for count, loss in region.counts.items()}
            call = self._call(number)
        for count in region.counts:
            count.replace_all_uses_with(self.copies[count])
        for place, each in enumerate(region.results):
            self._put(each, call, place)

    def _require_results(self) -> None:
        """Refuse what is no loss, and what this way would not be exact enough for."""
        region = self.region
        forward = [each for each in region.results if each.node not in self.backward]
        if not forward or any(each.kind == ROWS for each in forward):
            raise NotByChunksError("another product, and no loss, is made of it")
        if region.choice and any(each.kind == ROWS and each.layout.state == "all" for each in region.results):
            raise NotByChunksError("the loss leaves rows out, and something else reads them")
        if region.product.meta["val"].dtype is torch.float16:
            raise NotByChunksError("gradients of float16 that no scaler has scaled vanish; use bfloat16")

    def _scaled(self) -> set[fx.Node]:
        """What the region is given of the backward, and all of the backward that it is made of."""
        scaled: set[fx.Node] = set()
        stack = [each.node for each in self.region.given]
        for node in stack:
            if node in self.after and node not in self.region.counts:
                raise NotByChunksError(f"the backward reads {named(node)}, which is made of all rows")
        while stack:
            node = stack.pop()
            if node in self.backward and node not in scaled:
                scaled.add(node)
                stack += node.all_input_nodes
        return scaled

    def _only_tangent(self) -> fx.Node:
        """The one number that arrives at the loss."""
        tangents = [node for node in self.scaled if node.op == "placeholder"]
        if len(tangents) != 1 or tangents[0].meta["val"].dim():
            raise NotByChunksError("its gradients depend on more than one number that arrives at the loss")
        return tangents[0]

    def _require_linear(self) -> None:
        """Refuse gradients that are not in proportion to that number."""
        calls = (self.scaled - {self.tangent}) | (self.region.layouts.keys() & self.backward)
        products = {each.node for each in self.region.results if each.node in self.backward}
        for node in sorted(calls | products, key=self.order.__getitem__):
            if not is_linear(node, self.backward.__contains__):
                raise NotByChunksError(f"{named(node)} is not linear in the gradient of the loss")

    def _hoist(self, anchor: fx.Node) -> None:
        """Move what the call needs, and does not depend on the gradient that arrives, before a node."""
        needed: set[fx.Node] = set()
        stack = [each.node for each in self.region.given]
        while stack:
            node = stack.pop()
            if node not in needed and node.op != "placeholder" and node not in self.region.counts:
                needed.add(node)
                stack.extend(node.all_input_nodes)
        late = [node for node in needed - self.scaled if self.order[node] > self.order[anchor]]
        for node in sorted(late, key=self.order.__getitem__):
            anchor.prepend(node)

    def _call(self, number: int) -> fx.Node:
        """The call, for a gradient of one."""
        region, graph = self.region, self.graph
        self.copies[self.tangent] = self._ones()
        for node in sorted(self.scaled - {self.tangent}, key=self.order.__getitem__):
            args: Any = fx.map_arg(node.args, self._copy_of)
            kwargs: Any = fx.map_arg(node.kwargs, self._copy_of)
            self.copies[node] = self._made(node.target, *args, **kwargs)  # in storages of its own
        rows = [each for each in region.given if each.layout is not None]
        whole = [each for each in region.given if each.layout is None]
        taken = [self._by_rows(self._copy_of(each.node), each.layout) for each in rows]
        others = [self._copy_of(each.node) for each in whole]
        body = graph.get_attr(self._add_body([*rows, *whole], number))
        given: Any = region.product.args[-2]
        width, classes = int(given.meta["val"].shape[1]), int(region.product.meta["val"].shape[1])
        sizes = list(chunk_sizes(region.length, classes, width))
        kinds = [each.kind for each in region.results]
        call = graph.call_function(loss_by_chunks, (body, kinds, sizes, taken, others))
        call.meta = {key: item for key, item in region.product.meta.items() if key != "val"}
        call.meta["val"] = tuple(self._fake(each) for each in region.results)
        call.meta[FLOPS] = sum(map(node_flops, region.products))
        return call

    def _copy_of(self, node: fx.Node) -> fx.Node:
        return self.copies.get(node, node)

    def _ones(self) -> fx.Node:
        like = self.tangent.meta["val"]
        return self._made(ATEN.ones.default, [], dtype=like.dtype, device=like.device)

    def _made(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node, with its fake tensor."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {**self.product.meta, "val": fake_call(target, args, kwargs, self.product)}
        return node

    def _add_body(self, given: list[Given], number: int) -> str:
        """Add the body to the module; its inputs in this order."""
        region = self.region
        placeholders = [region.given[each] for each in given]
        made = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {each: made.placeholder(each.name) for each in placeholders}
        for node in region.body.nodes:
            if node.op != "placeholder":
                mapping[node] = made.node_copy(node, mapping.__getitem__)
        made.output(tuple(mapping[each] for result in region.results for each in result.outputs))
        made.eliminate_dead_code()
        name = f"hybridremat_loss_{number}"
        setattr(self.module, name, fx.GraphModule(torch.nn.Module(), made))
        return name

    def _by_rows(self, node: fx.Node, layout: RowLayout | None) -> fx.Node:
        """A tensor of rows with one dimension for them, and the chosen ones alone."""
        assert layout is not None
        shape, choice = list(node.meta["val"].shape), self.region.choice
        rest = shape[layout.dims :]
        if choice is not None and layout.state != "chosen":
            whole = self._viewed(node, [*choice.sizes, *rest])
            node = self._made(ATEN.slice.Tensor, whole, choice.dim, choice.start, choice.end)
            node = self._made(ATEN.clone.default, node, memory_format=torch.contiguous_format)
            layout = RowLayout(len(choice.sizes))
        return node if layout.dims == 1 else self._viewed(node, [-1, *rest])

    def _viewed(self, node: fx.Node, shape: list[int]) -> fx.Node:
        if list(node.meta["val"].shape) == shape:
            return node
        if not node.meta["val"].is_contiguous():
            node = self._made(ATEN.clone.default, node, memory_format=torch.contiguous_format)
        return self._made(ATEN.view.default, node, shape)

    def _fake(self, result: Result) -> Any:
        like = result.node.meta["val"]
        choice = self.region.choice
        shape: tuple[int, ...] = result.shape if result.kind == SUM else tuple(like.shape)
        if result.kind == ROWS and choice is not None and result.layout.state == "padded":
            shape = (int(torch.Size(choice.shape).numel()), *shape[1:])
        dtype = like.dtype if result.kind == ROWS else sum_dtype(like.dtype)
        return fake_call(torch.empty, [shape], {"dtype": dtype, "device": like.device}, result.node)

    def _total(self, loss: fx.Node) -> fx.Node:
        """The weight of all rows of a mean loss: what its second item is."""
        _, target, weight, _, ignored = loss.args
        kept = self._made(ATEN.ne.Scalar, target, ignored)
        dtype = loss.meta["val"][1].dtype
        if weight is None:
            counted = self._made(ATEN.sum.default, kept)
            return self._made(ATEN._to_copy.default, counted, dtype=dtype)
        safe = self._made(ATEN.mul.Tensor, target, kept)
        weights = self._made(ATEN.index_select.default, weight, 0, safe)
        return self._made(ATEN.sum.default, self._made(ATEN.where.ScalarOther, kept, weights, 0))

    def _put(self, result: Result, call: fx.Node, place: int) -> None:
        """Put a result of the call in place of a node."""
        node = result.node
        fakes: Any = call.meta["val"]
        with self.graph.inserting_before(node):
            made = self.graph.call_function(operator.getitem, (call, place))
            made.meta = {**call.meta, "val": fakes[place]}
            made.meta.pop(FLOPS)
            made.name = f"{node.name}_by_chunks"
            if node in self.backward:
                made = self._made(ATEN.mul.Tensor, made, self.tangent)
                made.meta = {**node.meta, "val": made.meta["val"]}
            elif result.scale is not None:
                by = result.scale if isinstance(result.scale, int) else self.totals[result.scale]
                made = self._made(ATEN.div.Tensor, made, by)
            made = self._padded(made, result)
            if tuple(made.meta["val"].shape) != tuple(node.meta["val"].shape):
                made = self._made(ATEN.view.default, made, list(node.meta["val"].shape))
            if made.meta["val"].dtype != node.meta["val"].dtype and not self._converts_alone(node, made):
                made = self._made(ATEN._to_copy.default, made, dtype=node.meta["val"].dtype)
        node.replace_all_uses_with(made)
        self._revalue(made)

    def _padded(self, made: fx.Node, result: Result) -> fx.Node:
        """Rows of a gradient in their places, zeros in the others."""
        choice = self.region.choice
        if choice is None or result.kind != ROWS or result.layout.state != "padded":
            return made
        rest = list(made.meta["val"].shape[1:])
        chosen = self._made(ATEN.view.default, made, [*choice.shape, *rest])
        size = [*choice.sizes, *rest]
        return self._made(ATEN.slice_backward.default, chosen, size, choice.dim, choice.start, choice.end, 1)

    def _converts_alone(self, node: fx.Node, made: fx.Node) -> bool:
        """Whether all that reads a node, through views, converts it to the type that it is made in."""
        readers = list(node.users)
        while readers:
            reader = readers.pop()
            if reader.target in _VIEWS:
                readers += reader.users
            elif not _converts(reader, made):
                return False
        return True

    def _revalue(self, made: fx.Node) -> None:
        """Give views of a sum their type, and leave out conversions to the type it has."""
        for reader in list(made.users):
            if reader.target in _VIEWS:
                reader.meta["val"] = fake_call(reader.target, reader.args, {}, made)
                self._revalue(reader)
            elif _converts(reader, made):
                reader.replace_all_uses_with(made)


def _converts(reader: fx.Node, made: fx.Node) -> bool:
    """Whether a node converts another to the type that it has."""
    value, fake = reader.meta.get("val"), made.meta["val"]
    alike = isinstance(value, torch.Tensor) and (value.dtype, value.device) == (fake.dtype, fake.device)
    return alike and reader.target in (ATEN._to_copy.default, CONVERT)

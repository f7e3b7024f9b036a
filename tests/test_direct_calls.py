"""Calls written as PyTorch's own functions and methods: the same op and arguments, and fewer views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridremat.compiler import direct_calls
from hybridremat.compiler.check import check
from hybridremat.compiler.direct_calls import ATEN, call_directly
from hybridremat.compiler.emit import emit
from hybridremat.graph.joint import plain_schedule
from support.training import traced

X, Y, SQUARE = torch.rand(2, 3, 4) + 0.5, torch.rand(2, 3, 4) + 0.5, torch.rand(4, 4) + 0.5
ROW, INDEX, IMAGE = torch.rand(4), torch.tensor([2, 0]), torch.rand(2, 4, 3, 3)
NORM = (IMAGE, ROW, ROW, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5)

CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    ATEN.add.Tensor: [((X, Y), {}), ((X, 2), {}), ((X, Y), {"alpha": 3})],
    ATEN.add.out: [((X, Y), {"out": X}), ((X, 0.5), {"out": X}), ((X, Y), {"alpha": 2, "out": Y})],
    ATEN.addmm.default: [((ROW, SQUARE, SQUARE), {}), ((ROW, SQUARE, SQUARE), {"beta": 0, "alpha": 2})],
    ATEN.bmm.default: [((X, X.transpose(1, 2)), {})],
    ATEN.cat.default: [(([X, Y], -1), {}), (([X, Y],), {})],
    ATEN.clone.default: [((X,), {}), ((X,), {"memory_format": torch.contiguous_format})],
    ATEN.detach.default: [((X,), {})],
    ATEN.div.Tensor: [((X, Y), {}), ((X, 3), {})],
    ATEN.div.out: [((X, Y), {"out": X})],
    ATEN.embedding.default: [((SQUARE, INDEX), {}), ((SQUARE, INDEX, 1), {})],
    ATEN.expand.default: [((ROW, [2, 3, 4]), {}), ((ROW, [5, -1]), {})],
    ATEN.mm.default: [((SQUARE, SQUARE), {})],
    ATEN.mul.Tensor: [((X, Y), {}), ((X, 0.5), {}), ((INDEX, 2), {}), ((INDEX, 0.5), {})],
    ATEN.mul.out: [((X, Y), {"out": Y}), ((X, 0.5), {"out": X})],
    ATEN.native_batch_norm.default: [(NORM, {})],
    ATEN.native_layer_norm.default: [((X, [4], ROW, ROW, 1e-5), {}), ((X, [3, 4], None, None, 1e-5), {})],
    ATEN.neg.default: [((X,), {})],
    ATEN.permute.default: [((X, [2, 0, 1]), {})],
    ATEN.pow.Tensor_Scalar: [((X, 3.0), {}), ((X, 2), {})],
    ATEN.pow.Tensor_Scalar_out: [((X, 2.0), {"out": X})],
    ATEN.relu.default: [((X,), {})],
    ATEN.rsqrt.default: [((X,), {})],
    ATEN.select.int: [((X, 1, 2), {})],
    ATEN.sigmoid.default: [((X,), {})],
    ATEN.squeeze.dim: [((X[:1], 0), {})],
    ATEN.sub.Tensor: [((X, Y), {}), ((X, 1), {})],
    ATEN.sub.out: [((X, Y), {"out": X})],
    ATEN.sum.dim_IntList: [((X, [0, 1], True), {}), ((X, [-1]), {"dtype": torch.float64})],
    ATEN.t.default: [((SQUARE,), {}), ((ROW,), {})],
    ATEN.tanh.default: [((X,), {})],
    ATEN.tanh.out: [((X,), {"out": X})],
    ATEN.transpose.int: [((X, 0, -1), {})],
    ATEN.unsqueeze.default: [((X, -1), {})],
    ATEN.view.default: [((X, [-1, 4]), {}), ((X[:1, :1, :1], []), {}), ((X, [24]), {})],
    ATEN.where.self: [((X > 1, X, Y), {})],
}
TABLES = {**direct_calls._METHODS, **direct_calls._SIZED, **direct_calls._FUNCTIONS}


class Recorded(TorchDispatchMode):
    """The ops that reach the dispatcher, with what they are called with."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.places = {each.data_ptr(): number for number, each in enumerate(inputs)}
        self.calls: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, self.described(args), self.described(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def described(self, item: Any) -> object:
        """Arguments as they can be compared: a tensor by the input that it is, its layout and its numbers."""
        if isinstance(item, torch.Tensor):
            return self.places.get(item.data_ptr()), item.shape, item.stride(), item.dtype, item.tolist()
        if isinstance(item, dict):
            return {name: self.described(each) for name, each in item.items()}
        return [self.described(each) for each in item] if isinstance(item, (list, tuple)) else item


def recorded(module: fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[list[object], object]:
    with torch.no_grad(), Recorded(inputs) as mode:
        results = module(*inputs)
    return mode.calls, mode.described(results)


def call_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A graph of one call, and its inputs."""
    graph, given = fx.Graph(), {}

    def node_for(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) not in given:
                given[id(item)] = graph.placeholder(f"x{len(given)}"), item
            return given[id(item)][0]
        return type(item)(map(node_for, item)) if isinstance(item, (list, tuple)) else item

    made = [node_for(item) for item in args], {name: node_for(item) for name, item in kwargs.items()}
    graph.output(graph.call_function(target, tuple(made[0]), made[1]))
    return fx.GraphModule(nn.Module(), graph), [item for _, item in given.values()]


def test_every_op_of_the_tables_has_a_case() -> None:
    assert CALLS.keys() == TABLES.keys()


CASES = [(op, args, kwargs) for op, cases in CALLS.items() for args, kwargs in cases]


@pytest.mark.parametrize("op, args, kwargs", CASES, ids=[str(op) for op, *_ in CASES])
def test_the_same_op_is_called_with_the_same_arguments(op: Any, args: Any, kwargs: Any) -> None:
    module, inputs = call_of(op, args, kwargs)
    kept = [item.clone() for item in inputs]
    expected = recorded(module, inputs)
    for item, before in zip(inputs, kept, strict=True):
        item.copy_(before)
    call_directly(module)
    (call,) = [node for node in module.graph.nodes if node.op.startswith("call")]
    assert call.target is not op or args[1:] == ([],)
    assert recorded(module, inputs) == expected
    for item, before in zip(inputs, kept, strict=True):
        item.copy_(before)


class Attending(nn.Module):
    """Two layers whose backward reads transposes of slices, and sums that are viewed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = (each.view(2, 4, 2, 4).transpose(1, 2) for each in layer(x).split(8, dim=2))
            x = (torch.tanh(q @ k.transpose(2, 3)) @ v).transpose(1, 2).reshape(2, 4, 8)
        return x.square().sum()


def test_views_that_the_forward_makes_are_saved() -> None:
    step = traced(Attending(), torch.rand(2, 4, 8))
    schedule = plain_schedule(step.graph)
    kept, again = (emit(step, schedule, save_views=each) for each in (True, False))
    assert check(step, *kept).peak == check(step, *again).peak
    for target in (ATEN.view.default, ATEN._unsafe_view.default, ATEN.expand.default):
        assert calls(kept[1], target) < calls(again[1], target)


def calls(module: fx.GraphModule, target: Any) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


def written(run: Callable[..., Any], *inputs: torch.Tensor) -> list[object]:
    """The methods that are called once a graph is written anew; it computes what it did."""
    module = fx.symbolic_trace(run)
    expected = Values(module).run(*inputs)
    call_directly(module)
    results = module(*inputs)
    assert [described(each) for each in results] == [described(each) for each in expected]
    return [node.target for node in module.graph.nodes if node.op == "call_method"]


def described(item: torch.Tensor) -> object:
    return item.shape, item.stride(), item.tolist()


def test_views_that_change_nothing_go_and_those_in_a_row_are_one() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        same = ATEN.view.default(ATEN.detach.default(x), [2, 12])
        twice = ATEN.view.default(ATEN.view.default(same, [4, 6]), [-1])
        apart = ATEN.view.default(ATEN.transpose.int(x, 0, 1), [3, 4, 2])
        return twice * 2, ATEN.view.default(apart, [3, 2, 2, 2]) + 1

    assert written(run, torch.rand(2, 12)) == ["view", "transpose", "view"]


def test_a_result_stays_a_view_of_what_its_caller_has() -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product, other = ATEN.mm.default(x, y), ATEN.mm.default(y, x)
        again = ATEN.t.default(ATEN.t.default(product))  # nobody has the product
        return ATEN.detach.default(x), again, other, ATEN.t.default(ATEN.t.default(other))

    assert written(run, SQUARE, SQUARE + 1) == ["detach", "t", "t"]


class Values(fx.Interpreter):
    """Notes what each node makes, as tracing does."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["val"] = result = super().run_node(n)
        return result

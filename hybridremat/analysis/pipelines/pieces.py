"""A model in pieces, one for each layer, as ``torch.distributed.pipelining`` cuts it; stages of them."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline

from hybridremat.analysis.pipelines.likeness import Likeness, likeness
from hybridremat.errors import CaptureError


@dataclass(frozen=True)
class StageInput:
    """A tensor that a stage is called with."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    received: bool

    @property
    def bytes(self) -> int:
        """Bytes of it."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def made(self, device: torch.device) -> torch.Tensor:
        """Such a tensor, of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


@dataclass(frozen=True)
class StageModule:
    """A stage: the module, what it is called with, and bytes that it sends or returns for a microbatch."""

    module: nn.Module
    inputs: tuple[StageInput, ...]
    sent: int

    def args(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Tensors of zeros to call it with."""
        return tuple(each.made(device) for each in self.inputs)


@dataclass(frozen=True)
class Pieces:
    """A model cut before each of its layers but the first.

    Attributes
    ----------
    graph
        What calls the pieces, and which results go where.
    modules
        The pieces.
    kinds
        What each is; equal ones take the same time and memory.
    device
        Where the model is.
    """

    graph: fx.Graph
    modules: tuple[nn.Module, ...]
    kinds: tuple[Likeness, ...]
    device: torch.device

    def stage(self, first: int, last: int) -> StageModule:
        """The pieces first … last − 1 as one module.

        What is received requires a gradient if it is of floats, as in ``Pipe.build_stage``.
        """
        made, places, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[StageInput]()
        inside = [node for node in self.graph.nodes if _piece(node) in range(first, last)]
        for node in inside:
            for source in node.all_input_nodes:
                if source not in places:
                    places[source] = made.placeholder(source.name)
                    inputs.append(self._input(source, node))
            places[node] = made.node_copy(node, lambda each: places[each])
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        if last == len(self.modules):
            results: Any = output.args[0]
            made.output(fx.node.map_arg(results, lambda each: places[each]))
            leaving = [each for each in output.all_input_nodes if each in inside]
        else:
            leaving = [each for each in inside if any(user not in inside for user in each.users)]
            made.output(tuple(places[each] for each in leaving))
        parts = {f"submod_pp_{n}": self.modules[n] for n in range(first, last)}
        sent = sum(self._bytes_of(each) for each in leaving)
        return StageModule(fx.GraphModule(parts, made), tuple(inputs), sent)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors without values that the model returns."""
        module = self.modules[-1]
        assert isinstance(module, fx.GraphModule)
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        values = (node.meta.get("val") for node in output.all_input_nodes)
        return tuple(value for value in values if isinstance(value, torch.Tensor))

    def _input(self, source: fx.Node, reader: fx.Node) -> StageInput:
        received = _piece(source) is not None
        value = self._value(source, reader)
        return StageInput(tuple(value.shape), value.dtype, received and value.is_floating_point(), received)

    def _value(self, source: fx.Node, reader: fx.Node) -> torch.Tensor:
        """The tensor without values that one piece is called with."""
        piece = _piece(reader)
        assert piece is not None
        module = self.modules[piece]
        assert isinstance(module, fx.GraphModule)
        holders = [node for node in module.graph.nodes if node.op == "placeholder"]
        value: torch.Tensor = holders[list(reader.args).index(source)].meta["val"]
        return value

    def _bytes_of(self, node: fx.Node) -> int:
        """Bytes of a value that leaves a stage."""
        for user in node.users:
            if user.op == "call_module":
                value = self._value(node, user)
                return value.numel() * value.element_size()
        piece = _piece(node)
        assert piece is not None
        module = self.modules[piece]
        assert isinstance(module, fx.GraphModule)
        (output,) = (each for each in module.graph.nodes if each.op == "output")
        place = node.args[1] if node.op == "call_function" else None
        made = [each for each in output.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
        made = made if not isinstance(place, int) else made[place : place + 1]
        return sum(each.meta["val"].numel() * each.meta["val"].element_size() for each in made)


def cut_in_pieces(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], layers: Sequence[str]
) -> Pieces:
    """Export a model, cut before each of these layers but the first; it is left as it was.

    Raises
    ------
    CaptureError
        If it cannot be exported, or its layers do not run once each, in their order.
    """
    spec = dict.fromkeys(layers[1:], SplitPoint.BEGINNING)
    with _restored([model.get_submodule(name) for name in layers]):
        try:
            pipe = pipeline(model, tuple(args), dict(kwargs), split_spec=spec)
        except Exception as error:  # what torch.export says
            raise CaptureError(
                f"torch.distributed.pipelining cannot cut this {type(model).__name__} before its layers "
                f"{layers[0]!r} … {layers[-1]!r}: {_first_line(error)}"
            ) from error
    modules = _modules(pipe)
    if len(modules) != len(layers):
        raise CaptureError(
            f"this {type(model).__name__} does not run its layers {layers[0]!r} … {layers[-1]!r} once each, "
            f"one after the other: cut before each, it has {len(modules)} pieces for {len(layers)} layers. "
            "Name another container by layers="
        )
    device, graph = next(model.parameters()).device, pipe.split_gm.graph
    kinds = tuple((*likeness(each), *_place(graph, number)) for number, each in enumerate(modules))
    return Pieces(graph, modules, kinds, device)


def _place(graph: fx.Graph, number: int) -> tuple[Hashable, ...]:
    """How a piece is joined to others: which inputs it is sent, and whether its outputs go on or return."""
    (call,) = (node for node in graph.nodes if node.op == "call_module" and _piece(node) == number)
    made = [call, *(user for user in call.users if user.op == "call_function")]
    readers = [user for each in made for user in each.users if user not in made]
    far = any(user.op == "call_module" and _piece(user) != number + 1 for user in readers)
    sent = tuple(_piece(source) is not None for source in call.all_input_nodes)
    return sent, far, any(user.op == "output" for user in readers)


def _piece(node: fx.Node) -> int | None:
    """Which piece makes a value; None for inputs of the model."""
    while node.op == "call_function" and node.target is operator.getitem:
        (source, *_) = node.args
        assert isinstance(source, fx.Node)
        node = source
    return int(str(node.target).rpartition("_")[2]) if node.op == "call_module" else None


def _modules(pipe: Pipe) -> tuple[nn.Module, ...]:
    modules = tuple(pipe.get_stage_module(n) for n in range(pipe.num_stages))
    for module in modules:
        assert isinstance(module, fx.GraphModule)
        module.graph.set_codegen(fx.graph.CodeGen())  # the first one takes keywords of the model, otherwise
        module.recompile()
    return modules


@contextmanager
def _restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """``pipeline`` writes attributes on the modules before which it cuts."""
    before = [dict(vars(each)) for each in modules]
    try:
        yield
    finally:
        for module, had in zip(modules, before, strict=True):
            for name in [name for name in vars(module) if name not in had]:
                del vars(module)[name]
            vars(module).update(had)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0]

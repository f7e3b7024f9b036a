"""Ops that can write their result over one of their inputs, and the ATen calls that do so.

A result may take the place of an input of the same shape, strides and type that fills its whole storage, if
the op reads each element (of a softmax each row) before it writes there. Products must not: ``mm(out=)``
accepts its own input, and computes wrong numbers. Whether a call gives the same bits as the plain one, and
allocates nothing, is tried on the device (:mod:`hybridremat.graph.costs.in_place_trials`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.tracing.signature import fake_value
from hybridremat.graph.tracing.trace import TracedStep

_UNARY: Final = (
    *("abs", "neg", "reciprocal", "sign", "square", "floor", "ceil", "round", "logical_not", "bitwise_not"),
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "erf", "sin", "cos", "tan"),
    *("tanh", "sigmoid", "silu", "gelu", "mish", "elu", "leaky_relu", "softplus", "clamp"),
    *("hardsigmoid", "hardswish", "hardtanh", "_softmax", "_log_softmax"),
)
_BINARY: Final = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "div.Tensor_mode", "fmod.Tensor"),
    *("maximum.default", "minimum.default", "atan2.default", "where.self", "lerp.Tensor", "lerp.Scalar"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "addcmul.default", "addcdiv.default"),
)
_BACKWARD: Final = (
    *("gelu", "silu", "tanh", "sigmoid", "threshold", "elu", "leaky_relu", "softplus", "mse_loss"),
    *("hardtanh", "hardsigmoid", "hardswish", "smooth_l1_loss", "native_dropout"),
)
_WITH_OUT: Final = frozenset(
    (
        *(f"{name}.default" for name in _UNARY),
        *_BINARY,
        *(f"{name}_backward.default" for name in _BACKWARD),
        *("_softmax_backward_data.default", "_log_softmax_backward_data.default"),
    )
)

# these allocate when they are given out=; their in-place forms do not, and overwrite the first argument alone
_FIRST_ARGUMENT: Final = frozenset(
    (
        *("relu.default", "masked_fill.Scalar", "masked_fill.Tensor"),
        *("add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar"),
    )
)


@dataclass(frozen=True)
class InPlaceForm:
    """A call that writes over one of its arguments: ``out`` is the keyword for it, empty for the first."""

    target: OpOverload
    out: str

    def keywords(self, kwargs: Mapping[str, Any], over: Any) -> dict[str, Any]:
        """The keywords of the call that writes over ``over``, from those of the plain one."""
        return {**kwargs, self.out: over} if self.out else dict(kwargs)


@cache
def in_place_form(target: object) -> InPlaceForm | None:
    """The form of an op that writes over an input; None if it has none."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = str(target).removeprefix("aten.")
    if name in _FIRST_ARGUMENT:
        packet, overload = name.split(".")
        return InPlaceForm(getattr(getattr(torch.ops.aten, f"{packet}_"), overload), "")
    if name not in _WITH_OUT:
        return None
    packet = target.overloadpacket
    for each in (getattr(packet, overload) for overload in packet.overloads()):
        outs = [entry.name for entry in each._schema.arguments if entry.is_out]
        if len(outs) == 1 and _arguments(each) == _arguments(target):
            return InPlaceForm(each, outs[0])
    return None


def _arguments(op: OpOverload) -> list[tuple[str, str]]:
    return [(entry.name, str(entry.type)) for entry in op._schema.arguments if not entry.is_out]


def overwritable(step: TracedStep, op: int) -> Iterator[tuple[int, fx.Node]]:
    """The values that an op's result could be written over, by shape and strides, and how it reads them.

    Only what the step itself makes: never a parameter, a buffer, or anything else that comes from outside.
    """
    node, traced = step.op_nodes[op], step.graph.ops[op]
    form = in_place_form(node.target)
    if form is not None and len(traced.writes) == 1:
        sources = node.all_input_nodes if form.out else [a for a in node.args[:1] if isinstance(a, fx.Node)]
        yield from laid_out_alike(step, op, sources)


def laid_out_alike(step: TracedStep, op: int, sources: Iterable[fx.Node]) -> Iterator[tuple[int, fx.Node]]:
    """The values among an op's inputs that its first result could be written over, and how it reads them."""
    node, traced, values = step.op_nodes[op], step.graph.ops[op], step.graph.values
    results = fake_value(node)
    result = results[0] if isinstance(results, (list, tuple)) else results
    if not isinstance(result, torch.Tensor):
        return
    written = traced.writes[0]
    seen: set[int] = set()
    for source in sources:
        held = step.node_values[source]
        if len(held) != 1 or held[0] in seen | step.shared or values[held[0]].producer is None:
            continue
        seen.add(held[0])
        readers = [n for n in node.all_input_nodes if held[0] in step.node_values[n]]
        fits = values[held[0]].bytes == values[written].bytes and result.numel() > 0
        if fits and readers == [source] and _is_laid_out_as(fake_value(source), result):
            yield held[0], source


def _is_laid_out_as(tensor: object, result: torch.Tensor) -> bool:
    """Whether every element of a tensor lies where the result has the same one."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and (tensor.dtype, tensor.shape, tensor.stride()) == (result.dtype, result.shape, result.stride())
        and tensor.storage_offset() == result.storage_offset() == 0
    )

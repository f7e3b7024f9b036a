"""Ops in place: their result is written over one of their inputs, by an ATen call that does so.

A result may take the place of an input of the same shape, strides and type that fills its whole storage, if
the op reads each element (of a softmax each row) before it writes there. Products must not: ``mm(out=)``
accepts its own input, and computes wrong numbers. A form counts only where a trial gives the same bits, and
allocates no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
from torch import fx

from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import device_of, distinct_kernels
from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.rewrites.rewrite import Call, Form, Rewrite
from hybridremat.graph.rewrites.trial import Trial, Way, tried
from hybridremat.graph.tracing.fx_nodes import has_effects, is_random
from hybridremat.graph.tracing.signature import distinct_arguments, fake_value
from hybridremat.graph.tracing.trace import TracedStep

logger = logging.getLogger(__name__)

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


@cache
def in_place_form(target: object) -> Form | None:
    """The form of an op that writes over an input; None if it has none."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = str(target).removeprefix("aten.")
    if name in _FIRST_ARGUMENT:
        packet, overload = name.split(".")
        return Form(getattr(getattr(torch.ops.aten, f"{packet}_"), overload), "")
    if name not in _WITH_OUT:
        return None
    packet = target.overloadpacket
    for each in (getattr(packet, overload) for overload in packet.overloads()):
        outs = [entry.name for entry in each._schema.arguments if entry.is_out]
        if len(outs) == 1 and _arguments(each) == _arguments(target):
            return Form(each, outs[0])
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
    seen: set[int] = set()
    for source in sources if traced.writes else ():
        held = step.node_values[source]
        if len(held) != 1 or held[0] in seen | step.shared or values[held[0]].producer is None:
            continue
        seen.add(held[0])
        readers = [n for n in node.all_input_nodes if held[0] in step.node_values[n]]
        both = (fake_value(source), fake_value(node)), (source.meta.get("val"), node.meta.get("val"))
        alike = all(_is_laid_out_as(*each) for each in both)  # the checker goes by what was traced
        if values[held[0]].bytes == values[traced.writes[0]].bytes and readers == [source] and alike:
            yield held[0], source


def _is_laid_out_as(tensor: object, results: object) -> bool:
    """Whether every element of a tensor lies where the first of the results has the same one."""
    result = results[0] if isinstance(results, (list, tuple)) else results
    return (
        isinstance(tensor, torch.Tensor)
        and isinstance(result, torch.Tensor)
        and tensor.layout is torch.strided
        and result.numel() > 0
        and (tensor.dtype, tensor.shape, tensor.stride()) == (result.dtype, result.shape, result.stride())
        and tensor.storage_offset() == result.storage_offset() == 0
    )


@dataclass(frozen=True)
class _Site:
    """An op, a value that it may overwrite, and its trial."""

    op: int
    value: int
    trial: Trial


def trial_name(key: str, node: fx.Node, source: fx.Node) -> str:
    """The name under which a trial of a kernel over one of its inputs is kept."""
    return f"{key} of {distinct_arguments(node)} over {node.all_input_nodes.index(source)}"


def _sites(step: TracedStep) -> list[_Site]:
    kernels = distinct_kernels(step)
    found = []
    for op in step.graph.ops if kernels.device != "meta" else ():
        node, key = step.op_nodes[op.id], kernels.key_of[op.id]
        if not key or not op.recomputable or is_random(node) or has_effects(node):
            continue
        for value, source in overwritable(step, op.id):
            form = in_place_form(node.target)
            assert form is not None
            name = trial_name(key, node, source)
            found.append(_Site(op.id, value, Trial(node, (Way(name, form, source),))))
    return found


def _proven(step: TracedStep, sites: Sequence[_Site], store: KernelStore) -> list[_Site]:
    """Those that give the same bits as the plain kernel, and allocate no more."""
    missing: dict[str, _Site] = {}
    for site in sites:
        if store.in_place.get(site.trial.ways[0].name) is None:
            missing.setdefault(site.trial.ways[0].name, site)
    if missing:
        trials = [site.trial for site in missing.values()]
        found = tried(trials, device_of(step.op_nodes), "alone, and overwrites nothing")
        for name, site in missing.items():
            figures = found[name]
            fits = figures is not None and figures[0] <= step.graph.ops[site.op].temp
            store.in_place.update({name: fits})
            if not fits:
                logger.info("%s is not written over %s", site.trial.node, site.trial.ways[0].over)
    return [site for site in sites if store.in_place.get(site.trial.ways[0].name)]


def _write(step: TracedStep, sites: Sequence[_Site]) -> TracedStep:
    over: dict[int, tuple[int, ...]] = {}
    for site in sites:
        over[site.op] = (*over.get(site.op, ()), site.value)
    ops = tuple(replace(op, overwrites=over.get(op.id, ())) for op in step.graph.ops)
    return replace(step, graph=replace(step.graph, ops=ops))


def _form(step: TracedStep, op: int, over: int | None) -> tuple[Form, fx.Node] | None:
    if over is None or step.graph.ops[op].runs.kernel:
        return None
    form, source = in_place_form(step.op_nodes[op].target), dict(overwritable(step, op)).get(over)
    return (form, source) if form is not None and source is not None else None


# What follows is read by the checker, and shares nothing with the tables and functions above.

# each row or element of the result is written after the same of the inputs was read for the last time
_BY_ELEMENT: Final = (
    *("elu", "leaky_relu", "softplus", "hardtanh", "hardsigmoid", "hardswish", "mse_loss", "smooth_l1_loss"),
)
_UPDATE: Final = "aten.copy_.default"  # how a joint graph updates the caller's tensors

_SAFE: Final = frozenset(
    (
        *(f"aten.{name}_backward.default" for name in _BY_ELEMENT),
        *("aten.hardswish.default", "aten.masked_fill.Tensor"),
        *("aten._softmax.default", "aten._log_softmax.default"),
        *("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default"),
    )
)


@cache
def plain_op(target: object) -> OpOverload | None:
    """The op without side effects that computes the same as one that writes into an argument, by its schema.

    None for every other op, and for one whose inputs must not be overwritten while it runs.
    """
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not target._schema.is_mutable:
        return None
    if str(target) == _UPDATE:
        return None
    packet = target.overloadpacket
    named = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), None)
    for name in () if named is None else named.overloads():
        plain = getattr(named, name)
        taken = ([entry for entry in op._schema.arguments if not entry.is_out] for op in (plain, target))
        given, other = ([(entry.name, str(entry.type)) for entry in each] for each in taken)
        if not plain._schema.is_mutable and given == other:
            safe = torch.Tag.pointwise in plain.tags or str(plain) in _SAFE
            return plain if safe else None
    return None


def _term(call: Call, _plain: Callable[[fx.Node], Call]) -> Call | None:
    plain = plain_op(call.target)
    outs = () if plain is None else [entry.name for entry in call.target._schema.arguments if entry.is_out]
    kwargs = {name: item for name, item in call.kwargs.items() if name not in outs}
    return None if plain is None else Call(plain, call.args, kwargs)


IN_PLACE: Final = Rewrite(
    name="in place", of_ops=True, find=_sites, proven=_proven, write=_write, form=_form, term=_term
)

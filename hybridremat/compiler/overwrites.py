"""The part of the checker that reads calls which write their result over one of their inputs.

It knows nothing of the planner's table of such calls: the schema names the plain op that a call stands for,
and says what it writes into. A call may write over a tensor that the step has made and does not return, which
fills its storage and is laid out as the result; nobody may read what was there afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import fx

from hybridremat.compiler.buffer_hazards import check_error
from hybridremat.compiler.parted_calls import BY_PARTS
from hybridremat.compiler.rng_replay import replay
from hybridremat.graph.private_torch import OpOverload, run_and_save_rng_state

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
def plain_op(target: object) -> Any:
    """The op without side effects that computes the same as one that writes into an argument, or by parts.

    None for every other op, and for one whose inputs must not be overwritten while it runs.
    """
    if target in BY_PARTS:
        return BY_PARTS[target]
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not target._schema.is_mutable:
        return None
    if str(target) == _UPDATE:
        return None
    packet = target.overloadpacket
    named = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), None)
    for name in () if named is None else named.overloads():
        plain = getattr(named, name)
        if not plain._schema.is_mutable and _arguments(plain) == _arguments(target):
            safe = torch.Tag.pointwise in plain.tags or str(plain) in _SAFE
            return plain if safe else None
    return None


def _arguments(op: OpOverload) -> list[tuple[str, str]]:
    return [(entry.name, str(entry.type)) for entry in op._schema.arguments if not entry.is_out]


def plain_keywords(node: fx.Node) -> dict[str, Any]:
    """The keywords that the plain op is called with."""
    if node.target in BY_PARTS:
        return {}
    outs = {entry.name for entry in _schema(node).arguments if entry.is_out}
    return {name: item for name, item in node.kwargs.items() if name not in outs}


def written_over(node: fx.Node) -> fx.Node | None:
    """What a call writes its result over; None for a call that writes into nothing."""
    if node.target in BY_PARTS or node.target in (run_and_save_rng_state, replay):
        over = node.kwargs.get("over")
        return over if isinstance(over, fx.Node) else None
    if plain_op(node.target) is None:
        return None
    for position, entry in enumerate(_schema(node).arguments):
        if entry.alias_info is not None and entry.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(entry.name)
            return given if isinstance(given, fx.Node) else None
    return None


def _schema(node: fx.Node) -> Any:
    assert isinstance(node.target, OpOverload)
    return node.target._schema


def refuse_unsafe_overwrites(
    module: fx.GraphModule, held: Mapping[fx.Node, Mapping[int, int]], returned: Collection[int] = ()
) -> set[int]:
    """The storages that a graph writes over.

    Raises PlanError if a call writes over what is not its own to write over, or is read afterwards.

    Parameters
    ----------
    module
        An emitted graph.
    held
        For each of its nodes, the storages that it holds: value → number. Parameters and buffers have none.
    returned
        Storages that the caller of the step may hold.
    """
    over: set[int] = set()
    holders: dict[int, list[fx.Node]] = {}
    gone: set[fx.Node] = set()
    for node in module.graph.nodes:
        storages = set(held.get(node, {}).values())
        for source in node.all_input_nodes:
            if source in gone:
                raise check_error(f"{node.name} reads {source.name}, which has been written over")
        if written_over(node) is not None or (plain_op(node.target) and node.target not in BY_PARTS):
            (taken,) = _taken(node, held, returned)
            gone.update(holders[taken])
            over.add(taken)
        for storage in storages:
            holders.setdefault(storage, []).append(node)
    return over


def _taken(
    node: fx.Node, held: Mapping[fx.Node, Mapping[int, int]], returned: Collection[int]
) -> set[int]:
    """The one storage that a call takes over."""
    over = written_over(node)
    storages = set(held[over].values()) if over is not None else set()
    if len(storages) != 1 or not storages.isdisjoint(returned):
        raise check_error(f"{node.name} writes over what is not the step's own")
    for source in node.all_input_nodes:
        if not storages.isdisjoint(held[source].values()) and _layout(source) != _layout(node):
            raise check_error(f"{node.name} is not laid out as {source.name}, which it writes over")
    return storages


def _layout(node: fx.Node) -> tuple[object, ...] | None:
    value = node.meta.get("val")
    if node.target is run_and_save_rng_state and value is not None:
        value = value[1]
    value = value[0] if isinstance(value, (list, tuple)) else value
    if not isinstance(value, torch.Tensor):
        return None
    whole = value.untyped_storage().nbytes()
    return value.dtype, value.shape, value.stride(), value.storage_offset(), whole

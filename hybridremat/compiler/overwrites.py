"""The part of the checker that reads calls which write their result over one of their inputs.

It knows nothing of the planner's table of such calls: the schema says what one writes into. A call may
write over a tensor that the step has made and does not return, which fills its storage and is laid out as the
result; nobody may read what was there afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from hybridremat.compiler.buffer_hazards import check_error
from hybridremat.graph.private_torch import OpOverload, run_and_save_rng_state
from hybridremat.graph.rewrites.in_place import plain_op
from hybridremat.graph.tracing.size_expressions import size_of


def written_over(node: fx.Node) -> fx.Node | None:
    """What a call writes its result over; None for a call that writes into nothing."""
    if isinstance(over := node.kwargs.get("over"), fx.Node):  # by parts, drawn and replayed as well
        return over
    if plain_op(node.target) is None:
        return None
    assert isinstance(node.target, OpOverload)
    for position, entry in enumerate(node.target._schema.arguments):
        if entry.alias_info is not None and entry.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(entry.name)
            return given if isinstance(given, fx.Node) else None
    return None


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
        if written_over(node) is not None or plain_op(node.target):
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
    whole = size_of(value.untyped_storage().nbytes())  # sizes may be symbols: comparing these would guard
    strides = tuple(map(size_of, value.stride()))
    return value.dtype, tuple(map(size_of, value.shape)), strides, size_of(value.storage_offset()), whole

"""Check that a joint graph that was read is what :class:`~hybridremat.graph.joint.JointGraph` promises."""

from __future__ import annotations

from itertools import chain

from hybridremat.graph.joint import JointGraph, Op


def require_sound_graph(graph: JointGraph) -> None:
    """Raise ValueError if ids are not places, name what is not there, or a figure is negative."""
    for what, items in (("op", graph.ops), ("value", graph.values)):
        if [item.id for item in items] != [*range(len(items))]:
            raise ValueError(f"the {what}s are not numbered by their places")
    if not {*range(len(graph.values))}.issuperset(chain(_named(graph), *map(_values_of, graph.ops))):
        raise ValueError("its graph names values that are not there")
    if not {*range(len(graph.ops))}.issuperset(graph.checkpointed):
        raise ValueError("its graph names ops that are not there")
    made = {value: op.id for op in graph.ops for value in op.writes}
    if made != {value.id: value.producer for value in graph.values if value.producer is not None}:
        raise ValueError("its values are not made by the ops that write them")
    for op in graph.ops:
        if op.variants and not 0 <= op.variant < len(op.variants):
            raise ValueError(f"{op.name} has no variant {op.variant}")
    figures = chain(
        [graph.rng_state_bytes],
        (value.bytes for value in graph.values),
        (each.workspace for each in graph.deliveries),
        *((op.flops, op.io_bytes, op.time, op.temp) for op in graph.ops),
        *((way.time, way.temp) for op in graph.ops for way in op.variants),
    )
    if min(figures) < 0:
        raise ValueError("its graph has negative bytes, times or flops")


def _named(graph: JointGraph) -> chain[int]:
    left = ((each.gradient, each.parameter) for each in graph.deliveries)
    return chain(graph.held_outputs, graph.released_outputs, graph.gradients, *left)


def _values_of(op: Op) -> chain[int]:
    return chain(op.reads, op.writes, op.overwrites, *(way.overwrites for way in op.variants))

"""Checkpointing each layer, as ``torch.utils.checkpoint`` around every one of a model's repeating modules.

No strategy: what users compare with. Forward ops outside of layers run once, and save what their backward
needs. Of a layer what code outside of it reads is kept, which includes the next layer's input; all else that
its backward needs is made again at once, where its backward begins.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from hybridremat.graph.joint import JointGraph, Op, Phase, Schedule, as_plain, plain_schedule
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import SchedulePoint

LEAST_MODULES = 2  # whose ops a layer has, itself included: each Linear of a list is none
STAGE = 0.9  # of an entry's ops are in layers of its own: it is a stage that holds them


def layers_of(graph: JointGraph) -> dict[int, str]:
    """For the forward ops in layers, the layer's path.

    Layers are the outermost numbered entries (``h.3``, ``layer1.0``) of lists in which an entry has the same
    ops as another one of the model. Entries that are hardly more than lists of such are not: the layers of a
    network in stages are the stages' blocks.
    """
    forward = [graph.ops[op] for op in graph.phase_ops(Phase.FORWARD)]
    ops: dict[str, list[Op]] = defaultdict(list)
    for op in forward:
        for entry in _entries(op.module):
            ops[entry].append(op)
    repeating = _repeating(ops)
    layers = {entry for entry in ops if _list(entry) in repeating} - _stages(ops, repeating)
    found = {op.id: next((e for e in _entries(op.module) if e in layers), None) for op in forward}
    return {op: layer for op, layer in found.items() if layer is not None}


def _entries(module: str) -> Iterator[str]:
    """The numbered entries of lists that a module path goes through, outermost first."""
    parts = module.split(".")
    for depth, part in enumerate(parts, start=1):
        if part.isdigit():
            yield ".".join(parts[:depth])


def _list(entry: str) -> str:
    """The list of an entry, with ``#`` for numbers: the stages of a network have lists of the same name."""
    return re.sub(r"\d+", "#", entry.rpartition(".")[0])


def _repeating(ops: Mapping[str, Sequence[Op]]) -> set[str]:
    """The lists in which an entry of several modules has the ops of another entry of the model."""
    kinds = {entry: tuple(sorted(op.target for op in inside)) for entry, inside in ops.items()}
    alike = Counter(kinds.values())
    return {
        _list(entry)
        for entry, kind in kinds.items()
        if alike[kind] > 1 and len({op.module for op in ops[entry]}) >= LEAST_MODULES
    }


def _stages(ops: Mapping[str, Sequence[Op]], repeating: Collection[str]) -> set[str]:
    """Entries that are one list of alike entries: with the same kinds of ops, and nearly all of theirs."""
    inside: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in ops:
        if _list(entry) in repeating:
            for outer in _entries(entry.rpartition(".")[0]):
                inside[outer, entry.rpartition(".")[0]].append(entry)
    found = set()
    for (outer, _), own in inside.items():
        kinds = Counter(frozenset(op.target for op in ops[entry]) for entry in own)
        if max(kinds.values()) > 1 and sum(len(ops[e]) for e in own) >= STAGE * len(ops[outer]):
            found.add(outer)
    return found


def checkpointed_layers(graph: JointGraph) -> SchedulePoint | None:
    """The step with each layer checkpointed, run as PyTorch runs it; None without layers that repeat."""
    schedule = layers_again(graph)
    return None if schedule is None else Judge(as_plain(graph))(schedule)


def layers_again(graph: JointGraph) -> Schedule | None:
    """The schedule of :func:`checkpointed_layers`: it depends on no size."""
    layer_of = layers_of(graph)
    if len(set(layer_of.values())) < 2:
        return None
    plain = plain_schedule(graph)
    forward, backward = plain.steps[: plain.num_forward], plain.steps[plain.num_forward :]
    again = _made_again(graph, layer_of, backward)
    steps = list(forward)
    for position, op in enumerate(backward):
        steps += again.get(position, ())
        steps.append(op)
    return Schedule(tuple(steps), len(forward))


def _made_again(
    graph: JointGraph, layer_of: Mapping[int, str], backward: Sequence[int]
) -> dict[int, list[int]]:
    """Forward ops to be run again, by the position in the backward before which they are."""
    made_in = _made_in(graph, layer_of)
    inner = _inner(graph, layer_of, made_in)
    starts: dict[str, int] = {}
    needed: dict[str, set[int]] = defaultdict(set)
    for position, number in enumerate(backward):
        reader = graph.ops[number]
        for value in made_in.keys() & set(reader.reads):
            layer = made_in[value]
            # of what others read, too, the layer's own backward reads the copy that is made again
            if value in inner or f"{reader.module}.".startswith(f"{layer}."):
                starts.setdefault(layer, position)
                needed[layer].add(value)
    by_layer: dict[str, list[Op]] = defaultdict(list)
    for op, layer in layer_of.items():
        by_layer[layer].append(graph.ops[op])
    made: dict[int, list[int]] = defaultdict(list)
    for layer, position in starts.items():
        made[position] += _closure(by_layer[layer], needed[layer], inner)
    return made


def _made_in(graph: JointGraph, layer_of: Mapping[int, str]) -> dict[int, str]:
    """The layer of each value that is made in one, is no output, and can be made again."""
    outputs = graph.held_outputs | graph.released_outputs
    return {
        value: layer
        for op, layer in layer_of.items()
        if graph.ops[op].recomputable
        for value in graph.ops[op].writes
        if value not in outputs
    }


def _inner(graph: JointGraph, layer_of: Mapping[int, str], made_in: Mapping[int, str]) -> set[int]:
    """Those that their layer alone reads in the forward."""
    inner = set(made_in)
    for number in graph.phase_ops(Phase.FORWARD):
        inner -= {v for v in graph.ops[number].reads if made_in.get(v) != layer_of.get(number)}
    return inner


def _closure(ops: Sequence[Op], needed: Collection[int], inner: Collection[int]) -> list[int]:
    """Those of a layer's ops, in order, that make what is needed from what is kept."""
    wanted, chosen = set(needed), []
    for op in reversed(ops):
        if wanted.intersection(op.writes):
            chosen.append(op.id)
            wanted.update(value for value in op.reads if value in inner)
    return chosen[::-1]

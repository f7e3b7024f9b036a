"""Which values are always saved: kept from their production to the end of the step, whatever the plan.

Keeping a value that costs next to nothing takes it out of every block's problem and of every boundary.
Six kinds are kept: step outputs that live anyway, tiny values, cheap values that forward ops read all
over the net (masks, position tables), outputs of ops that must not run twice, gradients that a
forward op makes, and what the user wants kept. What the user wants made again is not kept for its size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hybridremat.graph.joint import JointGraph, Op, Phase
from hybridremat.graph.pins import NO_PINS, Pins

TINY_SHARE = 0.0007
"""A value of at most this share of the plain peak is always saved…"""

TINY_TOTAL_SHARE = 0.015
"""…as long as all of them together stay below this share: in a net of 1,000 layers every value is tiny."""

GLOBAL_SHARE = 0.02
"""A value read all over the net is kept if its bytes are below this share of the plain peak…"""

GLOBAL_TOTAL_SHARE = 0.03
"""…and all such values together stay below this share."""

REBUILT_BYTES_SHARE = 0.5
"""A value read all over the net is rebuilt by each block if what it is made of is this much smaller…"""

REBUILT_TIME_SHARE = 0.001
"""…and making it takes at most this share of the step's time."""

GLOBAL_READERS = 4
"""Least number of forward readers of a value read all over the net."""

GLOBAL_SPAN = 1 / 3
"""Least share of the forward ops between the first and the last of these readers."""


@dataclass(frozen=True)
class AlwaysSaved:
    """Values always saved, optional ops that run in the forward for it, and ops rebuilt in each block."""

    values: frozenset[int]
    forward_optional: frozenset[int]
    rebuilt: frozenset[int] = frozenset()


def always_saved_values(graph: JointGraph, plain_peak: int, pins: Pins = NO_PINS) -> AlwaysSaved:
    """Find the values that every plan keeps.

    Parameters
    ----------
    plain_peak
        Bytes: the peak of the plain schedule, against which "tiny" and "cheap" are measured.
    pins
        What the user wants kept, and what made again.
    """
    readers = graph.readers()
    tiny = _tiny_bytes(graph, plain_peak)
    optional = _forward_optional(graph, tiny, readers, pins)
    saved = {value for value in graph.held_outputs if graph.values[value].producer is not None}
    saved |= pins.saved_values(graph)
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            continue
        if op.id not in pins.must_recompute and (op.phase is Phase.FORWARD or op.id in optional):
            saved.update(value for value in op.writes if graph.values[value].bytes <= tiny)
        if op.id in optional:
            saved.update(op.writes)
        elif not op.recomputable:
            saved.update(value for value in op.writes if readers[value])
        if op.phase is Phase.FORWARD:
            saved.update(graph.gradients.intersection(op.writes))
    rebuilt = set()
    remade = pins.recomputed_values(graph)
    for value in sorted(_global_values(graph, plain_peak, readers, saved)):
        producer = graph.producer(value)
        assert producer is not None
        if remade.isdisjoint(producer.reads) and _worth_rebuilding(graph, producer, saved):
            rebuilt.add(producer.id)
            saved.update(read for read in producer.reads if graph.values[read].producer is not None)
        elif value not in remade:
            saved.add(value)
    return AlwaysSaved(frozenset(saved), frozenset(optional), frozenset(rebuilt))


def _worth_rebuilding(graph: JointGraph, op: Op, saved: set[int]) -> bool:
    """Whether a cheap op makes one large value from small ones: a float mask from a boolean one."""
    if len(op.writes) != 1 or not op.recomputable or op.random or op.writes[0] in graph.released_outputs:
        return False
    sources = {read for read in op.reads if graph.values[read].producer is not None} - saved
    size = sum(graph.values[read].bytes for read in sources)
    cheap = op.time <= REBUILT_TIME_SHARE * sum(other.time for other in graph.ops)
    return cheap and size <= REBUILT_BYTES_SHARE * graph.values[op.writes[0]].bytes


def _tiny_bytes(graph: JointGraph, plain_peak: int) -> int:
    """The largest size of a tiny value. Values of one size are alike, so that layers stay identical."""
    made = (graph.producer(value.id) for value in graph.values)
    sizes = Counter(
        value.bytes
        for value, op in zip(graph.values, made, strict=True)
        if op is not None and op.phase is not Phase.BACKWARD and value.bytes <= TINY_SHARE * plain_peak
    )
    total, largest = 0, 0
    for size in sorted(sizes):
        total += size * sizes[size]
        if total > TINY_TOTAL_SHARE * plain_peak:
            break
        largest = size
    return largest


def _forward_optional(
    graph: JointGraph, tiny: int, readers: tuple[tuple[int, ...], ...], pins: Pins
) -> set[int]:
    """Optional ops that run once, in the forward: kept, tiny, not to run twice, or read by one of these."""
    chosen = {op for op in pins.must_save if graph.ops[op].phase is Phase.OPTIONAL}
    for op in graph.ops:
        if op.phase is not Phase.OPTIONAL or op.id in pins.must_recompute:
            continue
        if _is_tiny(graph, op, tiny) and _forward_reads(graph, op, chosen):
            chosen.add(op.id)
    for op in reversed(graph.ops):
        if op.phase is not Phase.OPTIONAL:
            continue
        feeds_chosen = any(reader in chosen for value in op.writes for reader in readers[value])
        if feeds_chosen or not op.recomputable:
            chosen.add(op.id)
    return chosen


def _is_tiny(graph: JointGraph, op: Op, tiny: int) -> bool:
    return bool(op.writes) and all(graph.values[value].bytes <= tiny for value in op.writes)


def _forward_reads(graph: JointGraph, op: Op, chosen: set[int]) -> bool:
    """Whether the op reads only what the forward makes (``chosen`` optional ops run in the forward)."""
    producers = (graph.producer(value) for value in op.reads)
    return all(made is None or made.phase is Phase.FORWARD or made.id in chosen for made in producers)


def _global_values(
    graph: JointGraph, plain_peak: int, readers: tuple[tuple[int, ...], ...], saved: set[int]
) -> set[int]:
    """Cheap values that forward ops read all over the net, smallest first, within a total."""
    position = {op: at for at, op in enumerate(graph.phase_ops(Phase.FORWARD))}
    found = []
    for value in graph.values:
        producer = graph.producer(value.id)
        if value.id in saved or producer is None or producer.phase is not Phase.FORWARD:
            continue
        read_at = [position[op] for op in readers[value.id] if op in position]
        wide = len(read_at) >= GLOBAL_READERS and read_at[-1] - read_at[0] > GLOBAL_SPAN * len(position)
        if wide and value.bytes < GLOBAL_SHARE * plain_peak:
            found.append((value.bytes, value.id))
    total, chosen = 0, set()
    for size, value_id in sorted(found):
        total += size
        if total <= GLOBAL_TOTAL_SHARE * plain_peak:
            chosen.add(value_id)
    return chosen

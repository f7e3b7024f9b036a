"""Which block sizes to try for a joint graph."""

from __future__ import annotations

from math import ceil

from hybridremat.graph.joint import JointGraph, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.pins import NO_PINS, Pins
from hybridremat.graph.segmentation.always_saved import kept_values
from hybridremat.graph.segmentation.forward_order import forward_line, groups_of, rebuilt_reads
from hybridremat.graph.segmentation.repeated_layers import group_kinds, repeated_stretches

LARGEST = 24
"""Larger blocks take long to solve, and longer to prove."""

SMALLEST = 12
"""Much smaller blocks leave the solver little to trade."""

DISTINCT_SHARE = 0.75
"""A second size above this share of the largest would cut nearly alike."""

SLACK = 1.25
"""Room for the pieces of a split layer to be unequal: cheap cuts are seldom in the middle."""


def block_sizes(graph: JointGraph, pins: Pins = NO_PINS) -> tuple[int, ...]:
    """Values of ``max_ops`` worth trying, in ascending order; the frontiers of all are merged.

    The largest size that solves quickly always; beside it, where the net repeats, about a layer, or the
    piece of one that a layer longer than that must be split into; otherwise the half and the middle.
    """
    kept = kept_values(graph, step_memory(graph, plain_schedule(graph)).peak, pins=pins)
    line = forward_line(graph, kept)
    groups = groups_of(line)
    if len(groups) <= SMALLEST:
        return (max(1, len(groups)),)
    stretches = repeated_stretches(group_kinds(graph, line.ops, groups))
    if not stretches:
        return (SMALLEST, (SMALLEST + LARGEST) // 2, LARGEST)
    layer = stretches[0].period
    layer_ops = line.ops[groups.start[stretches[0].start] : groups.start[stretches[0].start + layer]]
    layer += len({made for op in layer_ops for made in rebuilt_reads(graph, line, graph.ops[op])})
    pieces = ceil(layer / LARGEST)
    piece = layer if pieces == 1 else ceil(SLACK * layer / pieces)
    if not SMALLEST <= piece <= DISTINCT_SHARE * LARGEST:
        piece = SMALLEST
    return (piece, LARGEST)

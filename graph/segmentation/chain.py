"""The chain of complex blocks, as plain data. :mod:`hybridremat.graph.segmentation.segment` makes one.

Blocks 0…L−1 run forward in order and backward in reverse order. ``boundary[i]`` is what enters block
i (x_i), ``gradient_boundary[i]`` what block i hands to block i−1 in the backward (the bytes g_i).
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.graph.joint import JointGraph


@dataclass(frozen=True)
class Block:
    """Global op ids of one block, each tuple in execution order.

    ``forward`` holds forward ops, and optional ops whose values are always saved: these run in the
    forward, once. An op in ``optional`` stands in every block whose backward reads it: each block makes
    its own copy. ``backward`` holds backward ops, and optional ops too expensive to be made by several
    blocks or returned as gradients: these run once, and their values are handed down like gradients.
    """

    forward: tuple[int, ...]
    optional: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """A joint graph cut into blocks.

    Attributes
    ----------
    boundary
        L+1 sets of forward values: ``boundary[i]`` is alive between block i−1 and block i and read
        by a forward op at or after block i. ``boundary[0]`` and ``boundary[L]`` are empty.
    gradient_boundary
        L+1 sets of backward values: produced in blocks ≥ i, read in blocks < i. Parameter gradients
        are not among them.
    always
        Values kept from their production to the end of the step: held outputs, tiny values, cheap
        values read all over the net, outputs of ops that must not run twice.
    rebuilt
        Forward ops that stand in every block that reads what they make: each makes its own copy, in its
        forward too, from values that are always saved (a float mask from a boolean one).
    remade
        Values that the backward must not read as the forward left them: in no boundary, and not always saved.
    """

    graph: JointGraph
    blocks: tuple[Block, ...]
    boundary: tuple[frozenset[int], ...]
    gradient_boundary: tuple[frozenset[int], ...]
    always: frozenset[int]
    rebuilt: frozenset[int] = frozenset()
    remade: frozenset[int] = frozenset()

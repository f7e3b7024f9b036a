"""The chain as integers: all that the dynamic program needs to know (docs/method.md, "The chain").

Bytes and nanoseconds throughout. The values in ``chain.always`` are alive whatever is decided: they are
charged once, as ``always_bytes``, and ops that produce nothing else run once and are in no figure here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridremat.blocks.types import BlockBinding, OptionSet
from hybridremat.graph.segmentation.chain import Block, Chain
from hybridremat.graph.segmentation.skip_values import SkipValue, skip_values
from hybridremat.sequence.block_figures import SkipReads, plain_peaks, value_bytes


@dataclass(frozen=True, slots=True)
class OptionFigures:
    """An ordinary option: S_o, pf_o and pb_o in bytes, extra time in nanoseconds.

    ``unread`` are the skip values that the block makes and this option's backward does not read, ``read``
    those that enter the block and its backward reads; by rank among the block's. ``rerun_only`` options save
    what must not wait for the backward: they are for blocks that run again in it.
    """

    saved: int
    forward_peak: int
    backward_peak: int
    time: int
    unread: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()
    rerun_only: bool = False


@dataclass(frozen=True, slots=True)
class SoloFigures:
    """A solo option: pb_o in bytes, time in nanoseconds (its whole forward part included).

    ``read`` are the skip values entering the block that it reads, by rank.
    """

    backward_peak: int
    time: int
    read: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """One block: its options, time of one plain forward (uf), bytes of its parameter gradients."""

    options: tuple[OptionFigures, ...]
    solo: tuple[SoloFigures, ...]
    forward_time: int
    gradient_bytes: int


@dataclass(frozen=True)
class ChainProblem:
    """A chain of L blocks as integers.

    Attributes
    ----------
    blocks
        Figures of blocks 0…L−1.
    boundary_bytes
        a[s][j], s ≤ j ≤ L: bytes of boundary j that are not held already with boundary s.
    gradient_bytes
        g[i], 0 ≤ i ≤ L: bytes of the gradient boundary between block i and block i−1.
    later_gradients
        PG[t]: bytes of the parameter gradients of the blocks after t.
    plain_peak
        pn[s][k], s ≤ k < L: peak of a plain forward of block k, the part of its input that is not
        held with boundary s included.
    released_bytes
        For each block, bytes of released step outputs of earlier blocks: they live to the end of the
        first forward, beside all else.
    tangent_bytes
        Alive during the whole backward.
    always_bytes
        Alive at any time: values in ``chain.always``, and the generator states of random ops.
    skip_values
        Values that may die before the blocks that hold them are through.
    """

    blocks: tuple[BlockFigures, ...]
    boundary_bytes: tuple[tuple[int, ...], ...]
    gradient_bytes: tuple[int, ...]
    later_gradients: tuple[int, ...]
    plain_peak: tuple[tuple[int, ...], ...]
    released_bytes: tuple[int, ...] = ()
    tangent_bytes: int = 0
    always_bytes: int = 0
    skip_values: tuple[SkipValue, ...] = ()

    def __len__(self) -> int:
        return len(self.blocks)


def chain_problem(
    chain: Chain, bindings: Sequence[BlockBinding], option_sets: Sequence[OptionSet]
) -> ChainProblem:
    """The integers of ``chain`` when block i may use the options of ``option_sets[i]``.

    Raises
    ------
    ValueError
        If there is not one binding and one option set for each block.
    """
    if not len(chain.blocks) == len(bindings) == len(option_sets):
        raise ValueError(
            f"{len(chain.blocks)} blocks, {len(bindings)} bindings and {len(option_sets)} option sets: "
            "a chain needs one of each for every block"
        )
    graph = chain.graph
    gradients = [_gradient_bytes(chain, block) for block in chain.blocks]
    skips = skip_values(chain)
    figures = tuple(
        _figures(SkipReads(chain, skips, binding, i), options, gradients[i])
        for i, (binding, options) in enumerate(zip(bindings, option_sets, strict=True))
    )
    return ChainProblem(
        blocks=figures,
        boundary_bytes=_boundary_bytes(chain),
        gradient_bytes=tuple(value_bytes(chain, values) for values in chain.gradient_boundary),
        later_gradients=tuple(sum(gradients[t + 1 :]) for t in range(len(gradients))),
        plain_peak=plain_peaks(chain),
        released_bytes=_released_bytes(chain),
        tangent_bytes=sum(value.bytes for value in graph.values if value.tangent),
        always_bytes=value_bytes(chain, chain.always) + _generator_bytes(chain),
        skip_values=skips,
    )


def _figures(reads: SkipReads, options: OptionSet, gradient_bytes: int) -> BlockFigures:
    return BlockFigures(
        tuple(
            OptionFigures(
                o.saved_bytes,
                o.forward_peak,
                o.backward_peak,
                o.time,
                reads.unread(o),
                reads.read(o),
                reads.rerun_only(o),
            )
            for o in options.options
        ),
        tuple(SoloFigures(o.backward_peak, o.time, reads.read(o)) for o in options.solo),
        reads.forward_time,
        gradient_bytes,
    )


def _gradient_bytes(chain: Chain, block: Block) -> int:
    graph = chain.graph
    made = {value for op in block.backward for value in graph.ops[op].writes}
    return value_bytes(chain, made & graph.gradients)


def _generator_bytes(chain: Chain) -> int:
    """Room for the state of every random op, and for one replay (which swaps two states)."""
    random = sum(op.random for op in chain.graph.ops)
    return (random + 2) * chain.graph.rng_state_bytes if random else 0


def _boundary_bytes(chain: Chain) -> tuple[tuple[int, ...], ...]:
    boundary = [values - chain.always for values in chain.boundary]
    count = len(chain.blocks)
    return tuple(
        tuple(value_bytes(chain, boundary[j] - boundary[s]) if j > s else 0 for j in range(count + 1))
        for s in range(count)
    )


def _released_bytes(chain: Chain) -> tuple[int, ...]:
    """Outputs in the boundary are alive anyway when the block runs, and not charged again."""
    pending: set[int] = set()
    result = []
    for block, boundary in zip(chain.blocks, chain.boundary, strict=False):
        result.append(value_bytes(chain, pending - boundary))
        made = {value for op in block.forward for value in chain.graph.ops[op].writes}
        pending |= (made & chain.graph.released_outputs) - chain.always
    return tuple(result)

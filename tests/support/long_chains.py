"""Chains of equal blocks, of any length."""

from __future__ import annotations

from hybridremat.sequence.chain_problem import BlockFigures, ChainProblem, OptionFigures, SoloFigures


def long_chain(count: int) -> ChainProblem:
    keep, drop = OptionFigures(10, 10, 12, 0), OptionFigures(1, 10, 12, 5)
    return ChainProblem(
        blocks=(BlockFigures((keep, drop), (SoloFigures(12, 5),), 5, 1),) * count,
        boundary_bytes=tuple(tuple(int(j > s) for j in range(count + 1)) for s in range(count)),
        gradient_bytes=(0, *(1,) * (count - 1), 0),
        later_gradients=tuple(count - 1 - t for t in range(count)),
        plain_peak=tuple(tuple(10 + (k > s) for k in range(count)) for s in range(count)),
    )

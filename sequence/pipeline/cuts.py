"""Where a chain of layers is cut into stages.

With τ[q][s][t] the nanoseconds of one microbatch in stage q if that has the layers s … t−1, a pipeline of n
microbatches takes about Σ τ + (n − 1) · max τ. For a bound b on every τ the least sum is a dynamic program,

    D[s, q] = min over t of τ[q][s][t] + D[t, q + 1],   τ[q][s][t] ≤ b,

and lowering b below the slowest stage of what was found, again and again, gives all cuts whose sum and
slowest stage no other cuts beat: the best for any n is among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

StageTime = Callable[[int, int, int], int | None]
"""τ of a stage, its first layer and the one behind its last; None if that is not possible."""


@dataclass(frozen=True)
class Cuts:
    """A chain in stages.

    Attributes
    ----------
    at
        The first layer of each stage, and the number of layers: (0, …, L).
    total, slowest
        Sum and maximum of τ.
    """

    at: tuple[int, ...]
    total: int
    slowest: int

    def cost(self, max_weight: int) -> int:
        """Σ τ + weight · max τ."""
        return self.total + max_weight * self.slowest


def pareto_cuts(layers: int, stages: int, time: StageTime, *, most: int = 200) -> Iterator[Cuts]:
    """Cuts of rising sum and falling slowest stage, none of which is beaten in both; at most so many.

    Nothing, if there are none at all: fewer layers than stages, or no way for some stage.
    """
    table = {
        (stage, first, last): found
        for stage in range(stages)
        for first in range(stage, layers)
        for last in range(first + 1, layers - (stages - 1 - stage) + 1)
        if (first == 0) == (stage == 0) and (last == layers) == (stage == stages - 1)
        if (found := time(stage, first, last)) is not None
    }
    bound: int | None = None
    for _ in range(most):
        cuts = _least_sum(layers, stages, table, bound)
        if cuts is None:
            return
        yield cuts
        bound = cuts.slowest - 1


def best_cuts(layers: int, stages: int, time: StageTime, max_weight: int) -> Cuts | None:
    """The cuts of least Σ τ + weight · max τ; None if there are none."""
    found = pareto_cuts(layers, stages, time)
    return min(found, key=lambda each: (each.cost(max_weight), each.at), default=None)


def _least_sum(
    layers: int, stages: int, table: dict[tuple[int, int, int], int], bound: int | None
) -> Cuts | None:
    """The cuts of least sum with no stage slower than the bound; of equal sums, the fastest slowest stage."""
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {layers: (0, 0, (layers,))}
    for stage in reversed(range(stages)):
        ways: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for (at, first, last), time in table.items():
            if at != stage or last not in best or (bound is not None and time > bound):
                continue
            rest, slowest, cuts = best[last]
            way = rest + time, max(slowest, time), (first, *cuts)
            if first not in ways or way < ways[first]:
                ways[first] = way
        best = ways
    if 0 not in best:
        return None
    total, slowest, cuts = best[0]
    return Cuts(cuts, total, slowest)

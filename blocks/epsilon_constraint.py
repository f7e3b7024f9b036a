"""Options of one block by CP-SAT: ε-constraint, coarse to fine over both limits at once.

A rectangle of limits (saved bytes × peak bytes) is done when its tightest corner is hardly slower than its
loosest, since least time is monotone in the limits, or when it is small. Otherwise it is split, the
rectangles with the most at stake first.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from hybridremat.blocks.cpsat_search import BlockSearch
from hybridremat.blocks.types import BlockProblem, Effort, Option


@dataclass(frozen=True)
class _Rectangle:
    """Limits from the tightest to the loosest: saved bytes and peak bytes."""

    low_saved: int
    high_saved: int
    low_peak: int
    high_peak: int

    def rest(self, fastest: Option) -> tuple[_Rectangle, ...]:
        """What the option at the loosest corner leaves open, if it fits the whole length of a side."""
        peak = max(fastest.forward_peak, fastest.backward_peak)
        if fastest.saved_bytes <= self.low_saved:
            return (_Rectangle(self.low_saved, self.high_saved, self.low_peak, peak - 1),)
        if peak <= self.low_peak:
            return (_Rectangle(self.low_saved, fastest.saved_bytes - 1, self.low_peak, self.high_peak),)
        return ()

    def split(self, whole: _Rectangle) -> tuple[_Rectangle, _Rectangle]:
        """Halve the side that is longer as a share of ``whole``."""
        width, height = self.sides(whole)
        if width >= height:
            middle = (self.low_saved + self.high_saved) // 2
            return (
                _Rectangle(self.low_saved, middle, self.low_peak, self.high_peak),
                _Rectangle(middle + 1, self.high_saved, self.low_peak, self.high_peak),
            )
        middle = (self.low_peak + self.high_peak) // 2
        return (
            _Rectangle(self.low_saved, self.high_saved, self.low_peak, middle),
            _Rectangle(self.low_saved, self.high_saved, middle + 1, self.high_peak),
        )

    def sides(self, whole: _Rectangle) -> tuple[float, float]:
        """Width (saved) and height (peak) as shares of the whole rectangle's."""
        return (
            (self.high_saved - self.low_saved) / max(1, whole.high_saved - whole.low_saved),
            (self.high_peak - self.low_peak) / max(1, whole.high_peak - whole.low_peak),
        )


def explore_rectangles(
    problem: BlockProblem, effort: Effort, *, solo: bool, seconds: float = inf
) -> BlockSearch:
    """Solve for the rectangles with the most at stake until none matters or the solves are spent.

    ``seconds``: of a nominal core, after which nothing more is solved.
    """
    forward_time = sum(op.time for op in problem.ops)
    search = BlockSearch(
        problem,
        solo=solo,
        tolerance=int(effort.tolerance * forward_time),
        effort=effort.deterministic_time,
        seconds=seconds,
    )
    whole = _whole(problem, search)
    if whole is None:
        return search
    budget = effort.solo_solves if solo else effort.solves
    heap: list[tuple[float, int, _Rectangle]] = [(0.0, 0, whole)]
    pushed = 1
    while heap and search.solves < budget and search.spent < effort.family_time and not search.exhausted:
        _, _, rectangle = heappop(heap)
        if rectangle.low_saved > rectangle.high_saved or rectangle.low_peak > rectangle.high_peak:
            continue
        fastest = search.query((rectangle.high_saved, rectangle.high_peak))
        if fastest is None:
            continue
        slowest = search.query((rectangle.low_saved, rectangle.low_peak))
        gap = forward_time / 4 if slowest is None else slowest.time - fastest.time
        sides = rectangle.sides(whole)
        if gap <= search.tolerance or max(sides) <= effort.resolution:
            continue
        for part in rectangle.rest(fastest) or rectangle.split(whole):
            heappush(heap, (-gap * (sides[0] + 0.01) * (sides[1] + 0.01), pushed, part))
            pushed += 1
    return search


def _whole(problem: BlockProblem, search: BlockSearch) -> _Rectangle | None:
    """From outputs only and the least peak to all that is ever read and the peak of the fastest option."""
    unlimited = search.scale.most_units * search.scale.unit
    outputs = 0 if search.solo else sum(problem.value_bytes[d] for d in problem.outputs)
    read = {d for op in problem.ops for d in op.reads} | {d for step in problem.steps for d in step.reads}
    # A lower peak may need more saved bytes than the fastest option has.
    top = 0 if search.solo else sum(problem.value_bytes[d] for d in read | problem.outputs)
    fastest = search.query((top, unlimited))
    if fastest is None:
        return None
    high = max(fastest.forward_peak, fastest.backward_peak)
    low = max(max(step.during, step.tail) for step in problem.steps) - 1
    while high - low > max(1, high // 400):
        middle = (low + high) // 2
        found = search.query((top, middle))
        if found is None:
            low = middle
        else:
            high = max(found.forward_peak, found.backward_peak)
    # Saving little can need a higher peak than saving all: start from the higher of the two.
    leanest = search.query((outputs, unlimited)) or fastest
    peak = max(p for o in (fastest, leanest) for p in (o.forward_peak, o.backward_peak))
    return _Rectangle(outputs, top, high, peak)

"""The Pareto set of one block: all nondominated ways to run it.

Blocks with few enough values are answered from sweeps of their lattice (:mod:`hybridremat.blocks.surface`),
the others by CP-SAT: ε-constraint, coarse to fine over both limits at once. A rectangle of limits (saved
bytes × peak bytes) is done when its tightest corner is hardly slower than its loosest, since least time is
monotone in the limits, or when it is small. Otherwise it is split, the rectangles with the most at stake
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from hybridremat.blocks.lattice import Lattice
from hybridremat.blocks.scale import scale_block
from hybridremat.blocks.search import BlockSearch
from hybridremat.blocks.surface import Surface, explore
from hybridremat.blocks.types import BlockProblem, Option, OptionSet


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How fine to look. Counts and deterministic time only: the result must not depend on the machine.

    Attributes
    ----------
    solves, solo_solves
        Most solves for the ordinary and the solo family.
    resolution, limit_resolution
        Smallest side of a rectangle, and smallest distance of two peak limits of a lattice, as a share of the
        whole range.
    tolerance
        Time difference not worth a solve, as a share of the block's forward time.
    deterministic_time, family_time
        Limits of one solve, and of all solves of a family, in CP-SAT's deterministic seconds.
    limits, least_limits
        Most and least peak limits that a lattice is swept for.
    entries
        Array entries that all sweeps of a lattice may touch once they are more than the least limits.
    fused_above
        Array entries of one sweep beyond which ops that work for the next one alone run together with it.
    solved_above
        Array entries of one sweep beyond which CP-SAT solves instead.
    """

    solves: int = 240
    solo_solves: int = 40
    resolution: float = 0.01
    tolerance: float = 0.001
    deterministic_time: float = 0.3
    family_time: float = 3.0
    limit_resolution: float = 0.00001
    limits: int = 128
    least_limits: int = 48
    entries: int = 500_000_000
    fused_above: int = 300_000
    solved_above: int = 25_000_000


DEFAULT_EFFORT = Effort()


def enumerate_options(problem: BlockProblem, effort: Effort = DEFAULT_EFFORT) -> OptionSet:
    """Options of ``problem`` that no other option beats in saved bytes, both peaks and time.

    Returns
    -------
    OptionSet
        ``options`` by time, then saved bytes; ``solo`` by time, empty if the block cannot run again.

    Raises
    ------
    ValueError
        If the block cannot run at all.
    """
    lattice = Lattice(problem, scale_block(problem))
    if lattice.work > effort.fused_above:
        lattice = Lattice(problem, lattice.scale, fused=True)
    if lattice.exact and lattice.work <= effort.solved_above:
        found = _sweep(lattice, effort)
    else:
        ordinary, solo = (_explore(problem, effort, solo=solo) for solo in (False, True))
        found = OptionSet(
            options=nondominated(ordinary.options),
            solo=nondominated(solo.options),
            solves=ordinary.solves + solo.solves,
            unproved=ordinary.unproved + solo.unproved,
        )
    if not found.options:
        raise ValueError(f"no option found for a block of {len(problem.ops)} ops")
    return found


def _sweep(lattice: Lattice, effort: Effort) -> OptionSet:
    """All options from the lattice, for as many peak limits as the effort allows."""
    forward_time = sum(op.time for op in lattice.problem.ops)
    tick = lattice.scale.tick
    surface = Surface(lattice, tolerance=int(effort.tolerance * forward_time / tick))
    limits = max(effort.least_limits, min(effort.limits, effort.entries // lattice.work))
    explore(surface, limits=limits, resolution=effort.limit_resolution, much=forward_time // (4 * tick) + 1)
    return OptionSet(nondominated(surface.options), nondominated(surface.solo), solves=surface.sweeps)


def nondominated(options: Sequence[Option]) -> tuple[Option, ...]:
    """Options not matched or beaten in all four figures by another, by time, then saved bytes."""
    kept: list[tuple[int, int, int, int]] = []
    chosen = []
    for option in sorted(options, key=lambda o: (*_figures(o), o.saved, o.optional_forward, o.recompute)):
        figures = _figures(option)
        if not any(all(a <= b for a, b in zip(other, figures, strict=True)) for other in kept):
            kept.append(figures)
            chosen.append(option)
    return tuple(chosen)


def _figures(option: Option) -> tuple[int, int, int, int]:
    return option.time, option.saved_bytes, option.backward_peak, option.forward_peak


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
        saved_share = (self.high_saved - self.low_saved) / max(1, whole.high_saved - whole.low_saved)
        peak_share = (self.high_peak - self.low_peak) / max(1, whole.high_peak - whole.low_peak)
        if saved_share >= peak_share:
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
        return (
            (self.high_saved - self.low_saved) / max(1, whole.high_saved - whole.low_saved),
            (self.high_peak - self.low_peak) / max(1, whole.high_peak - whole.low_peak),
        )


def _explore(problem: BlockProblem, effort: Effort, *, solo: bool) -> BlockSearch:
    """Solve for the rectangles with the most at stake until none matters or the solves are spent."""
    forward_time = sum(op.time for op in problem.ops)
    search = BlockSearch(
        problem, solo=solo, tolerance=int(effort.tolerance * forward_time), effort=effort.deterministic_time
    )
    whole = _whole(problem, search)
    if whole is None:
        return search
    budget = effort.solo_solves if solo else effort.solves
    heap: list[tuple[float, int, _Rectangle]] = [(0.0, 0, whole)]
    pushed = 1
    while heap and search.solves < budget and search.spent < effort.family_time:
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

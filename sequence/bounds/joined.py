"""Bounds of a step of several graphs: the time that no choice of their schedules beats under a limit.

Alone each graph fits, so that a sum of their own bounds says nothing. With t_i, S_i, F_i and B_i the time,
saved bytes and peaks of the schedule of the i-th graph, the step's memory
(:mod:`hybridremat.sequence.joined_graphs`) is at every moment m, the forward or backward of one of them,

    Σ_i c_mi S_i + (F_m or B_m) + constants ≤ limit.

For a price λ ≥ 0 of bytes at a moment (Lagrange), no choice under the limit takes less than

    Σ_i min (t_i + λ c_mi S_i [+ λ F_i or λ B_i for the graph of the moment]) − λ (limit − constants),

where each minimum is over all schedules of one graph by itself: the linear program of
:mod:`hybridremat.sequence.bounds.relaxation`, with what is alive between the phases in its costs. Any λ gives
a bound; the best one is searched for, and the sum is concave in it. Graphs that are equal share their
minima, whatever schedules they run: bounds are for any number of ways.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Final, Literal

from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.sequence.bounds.certificate import moments_of, time_once
from hybridremat.sequence.bounds.linear_program import ITERATIONS
from hybridremat.sequence.bounds.moments import MOMENTS, with_boundary
from hybridremat.sequence.bounds.relaxation import PRICE_BITS, PhaseLimits, Prices, priced_program
from hybridremat.sequence.joined_graphs import MultiGraphStep, PartPoint

_ONE: Final = 1 << PRICE_BITS
"""A nanosecond, or a byte, as a price."""


@dataclass(frozen=True)
class PartGraph:
    """The graph of a part of the step, and how that runs: moments are where it takes most memory."""

    graph: JointGraph
    schedule: Schedule


@dataclass(frozen=True)
class StepMoment:
    """A phase of a section of the step.

    Attributes
    ----------
    section
        Its place in the forward.
    phase
        Of that section.
    counts
        How many times what each section saves is there then.
    constant
        Bytes of the rest, without the section's own peak.
    """

    section: int
    phase: Literal["forward", "backward"]
    counts: tuple[int, ...]
    constant: int


def step_moments(step: MultiGraphStep) -> Iterator[StepMoment]:
    """All moments of a step, whatever its parts save."""
    count, waiting = len(step.order), step.forwards - 1
    later = sum(step.parts[g].gradient_bytes for g in step.order)
    gone = dropped = waiting * step.dropped
    for section, (g, beside) in enumerate(zip(step.order, step.beside, strict=True)):
        later -= step.parts[g].gradient_bytes
        counts = tuple(waiting + (place < section) for place in range(count))
        yield StepMoment(section, "forward", counts, beside.forward - gone)
        held = later + step.joined_bytes + step.earlier_gradients + beside.backward
        yield StepMoment(section, "backward", counts, held - dropped)
        dropped += step.parts[g].dropped


@dataclass(frozen=True)
class JoinedEffort:
    """How hard a bound is looked for.

    Attributes
    ----------
    moments, iterations
        Moments of each graph's relaxation, and iterations of its solver.
    doublings, halvings
        How often a price is doubled or halved while that proves more, and how often the step between prices
        is then halved.
    heights
        Moments of the step that are tried: the highest ones.
    """

    moments: int = MOMENTS
    iterations: int = ITERATIONS
    doublings: int = 16
    halvings: int = 3
    heights: int = 3


@dataclass
class JoinedBounds:
    """Bounds of one step, whose minima are kept: asked again under other limits it takes less time.

    Attributes
    ----------
    step
        One point for each part, as it runs.
    graphs
        By part; none of those that run as they do whatever is chosen: code between graphs, and graphs
        without a backward.
    most
        The highest limit in bytes that bounds are asked under.
    effort
        How hard they are looked for.
    """

    step: MultiGraphStep
    graphs: Mapping[int, PartGraph]
    most: int
    effort: JoinedEffort = JoinedEffort()
    _known: dict[tuple[str, Prices, bool], int] = field(default_factory=dict)

    @cached_property
    def moments(self) -> tuple[StepMoment, ...]:
        """Those of the step, the highest first."""
        return tuple(sorted(step_moments(self.step), key=self._height, reverse=True))

    def time_under(self, limit: int) -> int:
        """Nanoseconds that no choice of schedules beats under a limit in bytes, at most ``most``."""
        assert limit <= self.most, "minima are those under the highest limit"
        near = [each for each in self.moments if 10 * self._height(each) >= 9 * self._height(self.moments[0])]
        return max(self._best(each, limit) for each in near[: self.effort.heights])

    def least_peak(self) -> int:
        """Bytes of the step that no choice of schedules goes below, where ``most`` is what one needs."""
        return min(self.most, max(map(self._least_at, self.moments)))

    def _best(self, moment: StepMoment, limit: int) -> int:
        """The bound of the best price at a moment: concave in it, and climbed in ever smaller steps."""
        exponent, step = self._start(moment), Fraction(1)
        best = self._at(moment, limit, _price(exponent))
        for _ in range(self.effort.doublings):
            better = self._beside(moment, limit, exponent, step)
            if better[0] <= best:
                break
            best, exponent = better
        for _ in range(self.effort.halvings):
            step /= 2
            best, exponent = max((best, exponent), self._beside(moment, limit, exponent, step))
        return max(best, self._at(moment, limit, 0))

    def _beside(
        self, moment: StepMoment, limit: int, exponent: Fraction, step: Fraction
    ) -> tuple[int, Fraction]:
        """The better of the bounds a step above and below, and its exponent."""
        both = (exponent - step, exponent + step)
        return max((self._at(moment, limit, _price(each)), each) for each in both)

    def _start(self, moment: StepMoment) -> Fraction:
        """A price to begin with: an eighth of the step's time for all that is there at the moment."""
        time = self.step.time((0,) * len(self.step.parts))
        return Fraction(round(math.log2(max(1, time) / max(1, self._height(moment)) / 8)))

    def _at(self, moment: StepMoment, limit: int, price: int) -> int:
        """The bound of a price (nanoseconds by 2^−30 a byte) at a moment."""
        total = 0
        for section, (part, count) in enumerate(zip(self.step.order, moment.counts, strict=True)):
            own = _peak_at(moment.phase, price if section == moment.section else 0)
            total += self._least(part, replace(own, saved=count * price))
        return total - -(-price * (limit - moment.constant) >> PRICE_BITS)

    def _least_at(self, moment: StepMoment) -> int:
        """Bytes at a moment that no choice of schedules goes below."""
        total = moment.constant
        for section, (part, count) in enumerate(zip(self.step.order, moment.counts, strict=True)):
            total += count * self._least_saved(part)
            if section == moment.section:
                total += self._least(part, _peak_at(moment.phase, _ONE), with_time=False)
        return total

    def _least_saved(self, part: int) -> int:
        """Bytes that a part saves at least; code between graphs may free what others have left."""
        if part not in self.graphs:
            return self.step.parts[part].points[0].saved
        return self._least(part, Prices(saved=_ONE), with_time=False)

    def _height(self, moment: StepMoment) -> int:
        """Bytes at a moment of the step as it runs."""
        points = [self.step.parts[part].points[0] for part in self.step.order]
        own = points[moment.section]
        peak = own.forward_peak if moment.phase == "forward" else own.backward_peak
        saved = sum(count * point.saved for count, point in zip(moment.counts, points, strict=True))
        return moment.constant + saved + peak

    def _least(self, part: int, prices: Prices, *, with_time: bool = True) -> int:
        """What a part costs at least: nanoseconds (or none), and bytes at their prices."""
        if part not in self.graphs:
            return _cost(self.step.parts[part].points[0], prices, with_time=with_time)
        key = self._name(part), prices, with_time
        if key not in self._known:
            self._known[key] = self._solved(part, prices, with_time=with_time)
        return self._known[key]

    def _name(self, part: int) -> str:
        """What parts of the same graph share; empty for one that is none."""
        return (self.graphs[part].graph.fingerprint or str(part)) if part in self.graphs else ""

    def _solved(self, part: int, prices: Prices, *, with_time: bool) -> int:
        own = self.graphs[part]
        once = time_once(own.graph) if with_time else 0
        if prices == Prices():
            return once
        moments = with_boundary(own.graph, moments_of(own.graph, own.schedule, self.effort.moments))
        # what others save leaves less room, and is not known while the least of it is looked for
        room = PhaseLimits(self.most, self.most) if not with_time else self._room(part)
        program = priced_program(own.graph, moments, room, prices, with_time=with_time)
        return max(once, program.lower_bound(self.effort.iterations))

    def _room(self, part: int) -> PhaseLimits:
        """Most bytes that the graph of a part has in each phase, wherever it runs."""
        room = {"forward": 0, "backward": 0}
        for moment in self.moments:
            if self._name(self.step.order[moment.section]) != self._name(part):
                continue
            others = zip(self.step.order, moment.counts, strict=True)
            taken = moment.constant + sum(count * self._least_saved(each) for each, count in others)
            room[moment.phase] = max(room[moment.phase], self.most - taken)
        return PhaseLimits(**room)


def _peak_at(phase: str, price: int) -> Prices:
    """A price of the peak of a phase."""
    return Prices(forward=price) if phase == "forward" else Prices(backward=price)


def _price(exponent: Fraction) -> int:
    """2 to the exponent, in nanoseconds by 2^−30 a byte."""
    return round(math.exp2(float(exponent) + PRICE_BITS))


def _cost(point: PartPoint, prices: Prices, *, with_time: bool) -> int:
    """What a part costs that runs in one way: rounded down."""
    size = point.saved * prices.saved + point.forward_peak * prices.forward
    size += point.backward_peak * prices.backward
    return point.time * with_time + (size >> PRICE_BITS)

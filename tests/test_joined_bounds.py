"""Bounds of steps of several graphs: never more than a choice of their schedules reaches, by enumeration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Phase, Schedule, ops_by_parts, plain_schedule
from hybridremat.sequence.bounds.joined import JoinedBounds, JoinedEffort, PartGraph
from hybridremat.sequence.bounds.moments import BOUNDARY, choose_moments, with_boundary
from hybridremat.sequence.bounds.relaxation import PRICE_BITS, PhaseLimits, Prices, priced_program
from hybridremat.sequence.joined_graphs import Beside, MultiGraphStep, PartPoint, StepPart
from support.examples import examples
from support.naive_memory import naive_between, naive_profile
from support.nets import chain
from support.tiny_steps import in_two_ways, schedules, tiny_steps

ONE = 1 << PRICE_BITS
NOTHING = Beside()


@dataclass(frozen=True)
class Way:
    """One way to run a graph: bytes and time."""

    forward: int
    backward: int
    saved: int
    time: int


def way_of(graph: JointGraph, schedule: Schedule) -> Way:
    profile, split = naive_profile(graph, schedule), schedule.num_forward
    return Way(
        max(profile[:split], default=0),
        max(profile[split:], default=0),
        naive_between(graph, schedule),
        sum(graph.ops[op].time for op in schedule.steps),
    )


def ways(graph: JointGraph) -> list[Way]:
    """All that no other is as good as in every figure, with at most one execution more than ops."""
    found: list[Way] = []
    every = {way_of(graph, each) for each in schedules(graph, len(graph.ops) + 1)}
    for way in sorted(every, key=lambda way: way.time):
        if not any(
            old.forward <= way.forward and old.backward <= way.backward and old.saved <= way.saved
            for old in found
        ):
            found.append(way)
    return found


@dataclass(frozen=True)
class Section:
    """A graph (its number) or code between graphs (its figures), with what its backward leaves."""

    graph: int | None
    figures: Way
    left: int
    dropped: int
    others: Beside = NOTHING


def peak_of(sections: list[Section], chosen: list[Way], joined: int, forwards: int, largest: int) -> int:
    """The most bytes at any time, section by section: what the formula says, written out."""
    kept_all = sum(way.saved - each.dropped for way, each in zip(chosen, sections, strict=True))
    waiting = (forwards - 1) * kept_all
    levels = []
    for at in range(len(sections)):
        own = chosen[at].forward + sections[at].others.forward
        levels.append(waiting + sum(way.saved for way in chosen[:at]) + own)
    earlier = sum(each.left for each in sections) + largest if forwards > 1 else 0
    for at in reversed(range(len(sections))):
        kept = sum(way.saved - each.dropped for way, each in zip(chosen[:at], sections[:at], strict=True))
        later = sum(each.left for each in sections[at + 1 :])
        own = chosen[at].backward + sections[at].others.backward
        levels.append(waiting + kept + own + later + joined + earlier)
    return max(levels)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[JointGraph], list[Section], int, int]:
    """One or two graphs, run two or three times in all, perhaps with code between; joined bytes, forwards."""
    graphs = draw(st.lists(tiny_steps(), min_size=1, max_size=2))
    small = st.integers(0, 6)
    sections: list[Section] = []
    for number in draw(st.lists(st.integers(0, len(graphs) - 1), min_size=2, max_size=3)):
        if draw(st.integers(0, 3)) == 0:
            saved = draw(st.integers(-2, 6))
            own = Way(max(0, saved) + draw(small), draw(small), saved, 0)
            sections.append(Section(None, own, draw(small), min(0, saved)))
        beside = draw(st.just(Beside()) | st.builds(Beside, small, small))
        sections.append(Section(number, Way(0, 0, 0, 0), draw(small), draw(st.integers(0, 1)), beside))
    return graphs, sections, draw(small), draw(st.sampled_from((1, 1, 2)))


def bounds_of(
    graphs: list[JointGraph], sections: list[Section], chosen: list[Way], most: int, how: tuple[int, int, int]
) -> JoinedBounds:
    """Bounds of a step that runs as chosen, under limits of at most ``most``."""
    joined, forwards, largest = how
    parts = tuple(
        StepPart((PartPoint(way.forward, way.backward, way.saved, way.time),), each.left, each.dropped)
        for way, each in zip(chosen, sections, strict=True)
    )
    others = tuple(each.others for each in sections)
    step = MultiGraphStep(parts, tuple(range(len(parts))), joined, forwards, largest, others=others)
    named = [replace(graph, fingerprint=f"graph {n}") for n, graph in enumerate(graphs)]
    run = {
        place: PartGraph(named[each.graph], plain_schedule(named[each.graph]))
        for place, each in enumerate(sections)
        if each.graph is not None
    }
    return JoinedBounds(step, run, most, JoinedEffort(heights=10))


def assert_bounds_hold(drawn, every: list[list[Way]]) -> int:
    """No choice of ways beats the bounds; returns how many bounds are more than each op once."""
    graphs, sections, joined, forwards = drawn
    how = joined, forwards, 3
    reached: dict[int, tuple[int, list[Way]]] = {}
    among = [[each.figures] if each.graph is None else every[each.graph] for each in sections]
    for chosen in product(*among):
        peak, time = peak_of(sections, list(chosen), *how), sum(way.time for way in chosen)
        if peak not in reached or time < reached[peak][0]:
            reached[peak] = time, list(chosen)
    front = sorted(reached.items())
    bounds = bounds_of(graphs, sections, front[0][1][1], front[-1][0], how)
    fastest, more = front[0][1][0], 0
    for limit, (time, _) in front:
        fastest = min(fastest, time)
        found = bounds.time_under(limit)
        assert found <= fastest, (limit, fastest)
        more += found > min(each for _, (each, _) in front)
    for _, (_, chosen) in front:
        least = peak_of(sections, chosen, joined, 1, 3)
        assert bounds_of(graphs, sections, chosen, least, (joined, 1, 3)).least_peak() <= least
    lowest = bounds_of(graphs, sections, front[-1][1][1], front[-1][0], how)
    assert lowest.least_peak() <= front[0][0]
    return more


@given(steps())
@examples(60, deadline=None)
def test_no_choice_of_schedules_beats_the_bounds(drawn) -> None:
    assert_bounds_hold(drawn, [ways(graph) for graph in drawn[0]])


@given(steps(), st.data())
@examples(15, deadline=None)
def test_bounds_count_the_better_of_two_ways_to_run_an_op(drawn, data: st.DataObject) -> None:
    graphs = [data.draw(in_two_ways(st.just(graph))) for graph in drawn[0]]
    every = [[*ways(graph), *ways(ops_by_parts(graph))] for graph in graphs]
    assert_bounds_hold((graphs, *drawn[1:]), every)


@given(tiny_steps(), st.integers(0, 3 * ONE), st.integers(0, ONE), st.integers(0, ONE))
@examples(40, deadline=None)
def test_no_schedule_costs_less_than_the_priced_program(
    graph: JointGraph, saved: int, forward: int, backward: int
) -> None:
    every = ways(graph)
    most = PhaseLimits(max(each.forward for each in every), max(each.backward for each in every))
    moments = with_boundary(graph, choose_moments(graph, [1] * len(graph.ops)))
    assert moments.ops[moments.forward] == BOUNDARY
    bound = priced_program(graph, moments, most, Prices(saved, forward, backward)).lower_bound()
    for each in every:
        size = each.saved * saved + each.forward * forward + each.backward * backward
        assert bound <= each.time + size / ONE


def test_moments_between_the_phases_part_them() -> None:
    graph = chain(4)
    moments = with_boundary(graph, choose_moments(graph, [1] * len(graph.ops)))
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            assert moments.earliest[op.id] > moments.forward
        elif op.phase is Phase.FORWARD:
            assert moments.latest[op.id] <= moments.forward


@pytest.mark.parametrize("count", [2, 6])
def test_chains_that_do_not_fit_together_have_to_recompute(count: int) -> None:
    """Each alone fits; what the others save is what leaves no room."""
    graph = chain(12)
    plain = way_of(graph, plain_schedule(graph))
    sections = [Section(0, plain, 0, 0)] * count
    chosen = [plain] * count
    most = peak_of(sections, chosen, 0, 1, 0)
    bounds = bounds_of([graph], sections, chosen, most, (0, 1, 0))
    once = count * plain.time
    assert bounds.time_under(most) == once
    found = [bounds.time_under(most * share // 100) for share in (90, 70, 50)]
    assert once < found[0] < found[1] < found[2]
    assert 30 <= bounds.least_peak() <= plain.backward  # a chain may save nothing: its input is there

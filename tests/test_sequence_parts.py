"""Steps in several graphs: the choice of points against enumeration, the peak against a replay in time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from hybridremat.graph.joint import PAGE
from hybridremat.sequence import joined_graphs
from hybridremat.sequence.joined_graphs import Beside, MultiGraphStep, PartPoint, StepPart, choose_points
from hybridremat.sequence.outside_memory import PhasePeaks
from support.examples import examples

BYTES = st.integers(0, 12)


@st.composite
def steps(draw):
    host = st.integers(0, 3).map(lambda pages: pages * PAGE)
    kept = st.integers(0, 3)
    point = st.builds(PartPoint, BYTES, BYTES, BYTES, st.integers(0, 9), kept, host, kept)
    part = st.builds(StepPart, st.lists(point, min_size=1, max_size=4).map(tuple), BYTES, st.integers(-4, 4))
    parts = draw(st.lists(part, min_size=1, max_size=3))
    rest = draw(st.lists(st.integers(0, len(parts) - 1), max_size=3))
    order = draw(st.permutations([*range(len(parts)), *rest]))
    beside = st.lists(st.builds(Beside, BYTES, BYTES), min_size=len(order), max_size=len(order)).map(tuple)
    return MultiGraphStep(
        tuple(parts), tuple(order), draw(st.integers(0, 3)), others=draw(st.just(()) | beside)
    )


def replayed_peak(step, chosen):
    """Walk through the step in time, adding and taking away what is there."""
    level, levels = 0, []
    others = step.others or [Beside()] * len(step.order)
    for g, beside in zip(step.order, others, strict=True):
        point = step.parts[g].points[chosen[g]]
        levels.append(level + point.forward_peak + beside.forward)
        level += point.saved
    gone = {g: step.parts[g].dropped - step.parts[g].points[chosen[g]].retained for g in step.order}
    level -= sum(gone[g] for g in step.order)
    for g, beside in zip(reversed(step.order), reversed(others), strict=True):
        point = step.parts[g].points[chosen[g]]
        level -= point.saved - gone[g]
        levels.append(level + point.backward_peak + step.joined_bytes + beside.backward)
        level += step.parts[g].gradient_bytes
    return max(levels)


def choices(step):
    return list(product(*(range(len(part.points)) for part in step.parts)))


@given(steps())
def test_peak_is_that_of_a_walk_through_the_step(step):
    for chosen in choices(step):
        assert step.peak(chosen) == replayed_peak(step, chosen)


@given(steps(), st.integers(1, 3), BYTES, BYTES, BYTES)
def test_what_one_graph_sees_of_the_step_is_the_step(step, forwards, forward, backward, saved):
    """Whatever it takes itself, where the others run as they were chosen."""
    step = replace(step, forwards=forwards)
    own = PhasePeaks(forward, backward, saved)
    for chosen in choices(step):
        for g in range(len(step.parts)):
            moments = step.moments_of(g, chosen)
            point = step.parts[g].points[chosen[g]]
            kept = point.inputs
            way = PartPoint(forward, backward + kept, saved + kept, 1, point.retained, inputs=kept)
            part = replace(step.parts[g], points=(way,))
            parts = tuple(part if n == g else each for n, each in enumerate(step.parts))
            whole = replace(step, parts=parts).peak([0 if n == g else c for n, c in enumerate(chosen)])
            assert max(each.needs(own) for each in moments) == whole


def hosted(step, chosen):
    """Bytes of host memory that the moves of all graphs take."""
    return sum(step.parts[g].points[chosen[g]].host for g in step.order)


@examples(60)
@given(steps(), st.integers(0, 80), st.none() | st.integers(0, 8), st.integers(1, 2))
def test_least_time_under_a_limit(step, limit, pages, forwards):
    """Of choices that take as long, the one that moves least."""
    step = replace(step, host_limit=pages if pages is None else pages * PAGE, forwards=forwards)
    fitting = [
        c
        for c in choices(step)
        if step.peak(c) <= limit and (pages is None or forwards * hosted(step, c) <= pages * PAGE)
    ]
    chosen = choose_points(step, limit=limit)
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        assert chosen in fitting and step.has_room(chosen) and step.host(chosen) == hosted(step, chosen)
        figures = [(step.time(c), hosted(step, c)) for c in fitting]
        assert (step.time(chosen), hosted(step, chosen)) == min(figures)


@examples(60)
@given(steps(), st.integers(0, 80), st.integers(1, 2))
def test_graphs_that_are_equal_take_few_points(step, limit, most):
    """Each run as a part of its own, against all choices of which no graph takes more points."""
    apart = replace(step, parts=tuple(step.parts[g] for g in step.order), order=tuple(range(len(step.order))))
    alike = [[p for p, g in enumerate(step.order) if g == graph] for graph in range(len(step.parts))]
    fitting = [
        c
        for c in choices(apart)
        if replayed_peak(apart, c) <= limit and all(len({c[p] for p in group}) <= most for group in alike)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined_graphs, "VARIANTS", most)
        chosen = choose_points(apart, limit=limit, alike=alike, hint=(0,) * len(apart.parts))
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        assert chosen in fitting
        assert apart.time(chosen) == min(map(apart.time, fitting))


@examples(60)
@given(steps(), st.integers(0, 60))
def test_least_memory_within_a_time(step, most):
    fitting = [c for c in choices(step) if step.time(c) <= most]
    chosen = choose_points(step, most_time=most)
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        assert step.peak(chosen) == min(replayed_peak(step, c) for c in fitting)


@examples(60)
@given(steps(), st.none() | st.integers(0, 80), st.none() | st.integers(0, 60))
def test_a_search_that_found_nothing_still_keeps_what_was_asked(step, limit, most):
    """Its effort was over: the fastest points, or those of least peak, if they satisfy it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined_graphs, "solved", lambda *_: cp_model.UNKNOWN)
        chosen = choose_points(step, limit=limit, most_time=most)
    fastest = tuple(min(range(len(p.points)), key=lambda n, p=p: p.points[n].time) for p in step.parts)

    def satisfies(choice):
        fits = limit is None or replayed_peak(step, choice) <= limit
        return fits and (most is None or step.time(choice) <= most)

    assert chosen is not None or not satisfies(fastest)
    assert chosen is None or satisfies(chosen)

"""Choices for steps of several graphs, against enumeration of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.errors import InfeasibleLimitError
from hybridremat.planning.breaks.frontier import PathFrontier
from hybridremat.planning.breaks.problem import PathProblem
from hybridremat.planning.breaks.searches import BETWEEN, GAP_APART, best, hull, targets_between
from hybridremat.planning.settings import Settings
from hybridremat.runtime.prepare import model_frontier
from hybridremat.sequence.joined_graphs import (
    VARIANTS,
    MultiGraphStep,
    PartPoint,
    StepPart,
    largest_part,
    most_of,
)
from support.towers import NormedTower, tower_batch

FIGURES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=9)


def is_corner(point, every):
    """Whether no mixture of two others is as good in both figures."""
    x, y = point
    others = [each for each in every if each != point]
    for (x0, y0), (x1, y1) in product(others, others):
        if x0 <= x and y0 <= y:
            return False
        if x0 < x < x1 and y0 * (x1 - x) + y1 * (x - x0) <= y * (x1 - x0):
            return False
    return True


@given(FIGURES)
def test_a_hull_has_the_points_that_no_mixture_of_others_beats(figures):
    assert hull(sorted(figures)) == sorted(each for each in set(figures) if is_corner(each, figures))


def frontier(*wide, **how):
    torch.manual_seed(0)
    asked = Settings(units=("layers.*",), cost_model="flops", workers=1, **how)
    found, *_ = model_frontier(NormedTower(*wide), (), tower_batch(), asked, progress=False)
    assert isinstance(found, PathFrontier)
    return found


def thinned(problem: PathProblem, most: int) -> PathProblem:
    """The same with every so manieth point of each graph, the plain one among them."""
    offered = tuple(
        tuple(dict.fromkeys([*points[:: max(1, len(points) // most)], points[-1]]))
        for points in problem.offered
    )
    return replace(problem, offered=offered)


def enumerated(problem: PathProblem) -> list[tuple[int, int]]:
    """Bytes and time of all choices in which equal graphs take a few ways at most."""
    apart = problem.apart()
    step = apart.step(apart.offered)
    found = []
    for chosen in product(*(range(len(points)) for points in apart.offered)):
        ways: Counter[str] = Counter(key for key, _ in {*zip(apart.keys, chosen, strict=True)})
        if max(ways.values()) <= VARIANTS:
            points = (*chosen, *[0] * (len(step.parts) - len(chosen)))
            found.append((step.peak(points), step.time(points)))
    return found


@pytest.mark.parametrize(("wide", "points"), [((64,) * 4, 3), ((64, 96, 64), 4)], ids=str)
def test_the_best_choice_is_that_of_an_enumeration(wide, points):
    problem = thinned(frontier(*wide)._problem, points)
    every = enumerated(problem)
    low, high = min(peak for peak, _ in every), max(peak for peak, _ in every)
    assert best(problem, low - 1, None) is None
    for part in range(9):
        limit = low + (high - low) * part // 8
        fastest = min(time for peak, time in every if peak <= limit)
        found = best(problem, limit, None)
        assert found is not None
        step = found[0].step(found[0].offered)
        assert step.peak(found[1]) <= limit
        assert fastest <= step.time(found[1]) <= fastest * (1 + GAP_APART)


def test_targets_lie_between_a_point_that_is_taken_and_its_neighbours():
    (points,) = frontier(64, 64)._problem.offered[:1]
    corners = hull(sorted((each.phases.between, each.time) for each in points))
    assert len(corners) > 3
    saved, time = corners[1]
    taken = [each for each in points if (each.phases.between, each.time) == (saved, time)][:1]
    found = list(targets_between(points, taken))
    assert len(found) == 2 * (BETWEEN - 1)
    for (less, slow), (more, _) in ((corners[0], corners[1]), (corners[1], corners[2])):
        mine = [target for target, slower in found if slower == slow]
        assert mine == sorted(mine) and less < mine[0] and mine[-1] < more
    assert not list(targets_between(points, []))


def test_a_frontier_plans_each_of_its_points_once(monkeypatch):
    found, asked = frontier(64, 64), []
    plan_for = PathFrontier.plan_for

    def counted(self, settings, *rest, **how):
        asked.append((settings.memory_limit, settings.max_overhead))
        return plan_for(self, settings, *rest, **how)

    monkeypatch.setattr(PathFrontier, "plan_for", counted)
    found = PathFrontier(found.survey)
    points = found.points()
    assert len(points) > 2 and found.figures_at(points[0].peak, None) in points
    for _ in range(2):
        with pytest.raises(InfeasibleLimitError, match="no plan fits"):
            found.plan_under(1000)
    assert len(asked) == len(set(asked))


SIZES = st.integers(0, 9)
CODE = st.builds(
    lambda forward, backward, saved, left, dropped, freed: StepPart(
        (PartPoint(forward, backward, saved, 0, inputs=-freed),), left, dropped
    ),
    SIZES, SIZES, st.integers(-4, 9), SIZES, st.integers(-4, 4), st.integers(0, 4),
)


@given(CODE, st.none() | CODE, st.integers(1, 2))
def test_the_most_of_two_measurements_takes_no_less_than_either(first, second, forwards):
    graph = StepPart((PartPoint(10, 12, 5, 7),), 3, 1)
    nothing = StepPart((PartPoint(0, 0, 0, 0),), 0)
    peaks = [
        MultiGraphStep((graph, each or nothing), (0, 1, 0, 1), 2, forwards, 3).peak((0, 0))
        for each in (most_of(first, second), first, second)
    ]
    assert peaks[0] >= max(peaks[1:])
    assert most_of(first, first) == first and most_of(None, None) is None


@given(st.lists(CODE, min_size=1, max_size=3))
def test_code_that_is_not_known_takes_no_less_than_any_that_is_and_frees_no_inputs(codes):
    """Graphs of a path that was not surveyed may keep all of them."""
    graph, most = StepPart((PartPoint(10, 12, 5, 7),), 3, 1), largest_part(codes)
    for code in codes:
        (point,) = code.points
        kept = replace(
            point, forward_peak=point.forward_peak - point.inputs, saved=point.saved - point.inputs, inputs=0
        )
        held = replace(code, points=(kept,), dropped=code.dropped - point.inputs)
        peaks = [MultiGraphStep((graph, each), (0, 1, 0, 1)).peak((0, 0)) for each in (most, held)]
        assert peaks[0] >= peaks[1]

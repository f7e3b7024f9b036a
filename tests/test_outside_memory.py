"""Outside memory to the byte, worked out by hand for a tangent of 3 bytes and a gradient of 5."""

from __future__ import annotations

import pytest

from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import plain_schedule
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.planner import plan_graph
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.outside_memory import OutsideMemory, PhasePeaks, needed_bytes
from support.random_steps import small_graph

PEAKS = PhasePeaks(forward=100, backward=90, between=40)


@pytest.mark.parametrize(
    ("reserve", "forwards", "needed"),
    [
        (0, 1, 100),  # the forward's own peak
        (13, 1, 100),  # between: 40 + 13; backward: 90 + 13, of which 3 are the tangents
        (14, 1, 101),  # backward: 90 + 14 − 3
        (61, 1, 148),
        (0, 2, 140),  # a second forward beside the first: 100 + 40; backward: 90 + 40 + 5 + 5
        (1, 2, 140),
        (4, 2, 141),  # backward: 90 + 40 + 4 − 3 + 5 + 5
        (0, 3, 180),
    ],
)
def test_each_phase_is_charged_what_the_caller_takes_in_it(reserve, forwards, needed):
    graph = small_graph(gradients=frozenset({5}))
    assert needed_bytes(graph, PEAKS, OutsideMemory(reserve, forwards)) == needed


@pytest.mark.parametrize("reserve", [1, 50, 200])
def test_between_the_phases_the_whole_reserve_counts(reserve):
    graph = small_graph(gradients=frozenset({5}))
    peaks = PhasePeaks(forward=0, backward=0, between=40)
    assert needed_bytes(graph, peaks, OutsideMemory(reserve)) == 40 + reserve


def test_between_the_phases_outputs_are_there_that_the_caller_drops():
    """a is saved, and c is returned."""
    graph = small_graph(gradients=frozenset({5}), released_outputs=frozenset({3}))
    judge = Judge(graph, outside=OutsideMemory(200))
    assert judge.phases(plain_schedule(graph)).between == 10 + 40
    assert judge.needs(plain_schedule(graph)) == 10 + 40 + 200


@pytest.mark.parametrize("reserve", [0, 40, 500])
def test_the_least_limit_is_exact(reserve):
    judge = Judge(small_graph(gradients=frozenset({5})), outside=OutsideMemory(reserve))
    frontier = plan_graph(judge.graph, cache=OptionCache(), workers=1, outside=judge.outside)
    least = min(judge.needs(each.schedule) for each in frontier.candidates)
    assert frontier.choose(least, None).needs == least
    assert least <= judge.needs(plain_schedule(judge.graph))
    with pytest.raises(InfeasibleLimitError) as refused:
        frontier.choose(least - 1, None)
    assert refused.value.least == least

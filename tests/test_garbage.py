"""When garbage is collected while a step is captured and planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import hybridremat
from hybridremat.graph.garbage import SELDOM, collected_seldom
from hybridremat.planning import planner
from support.training import small
from support.wrapping import wrap


@pytest.fixture(autouse=True)
def threshold() -> Iterator[tuple[int, int, int]]:
    """The collector's threshold, as it is found and left."""
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_planning_collects_seldom_and_leaves_the_collector_as_it_was(
    threshold: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_graph, seen = planner.plan_graph, []

    def watched(*args, **how):
        seen.append(gc.get_threshold()[0])  # Dynamo has a say in that of the oldest objects, since 2.15
        return plan_graph(*args, **how)

    monkeypatch.setattr(planner, "plan_graph", watched)
    model, batch = small("mlp")
    wrap(model, batch, "90%")
    assert seen == [SELDOM] and gc.get_threshold() == threshold
    model, batch = small("mlp")
    with pytest.raises(hybridremat.InfeasibleLimitError):
        wrap(model, batch, 1000)
    assert gc.get_threshold() == threshold


@pytest.mark.parametrize(("own", "meanwhile"), [(0, 0), (3 * SELDOM, 3 * SELDOM), (7, SELDOM)])
def test_a_collector_that_is_off_or_more_patient_stays_so(own: int, meanwhile: int) -> None:
    gc.set_threshold(own, 4, 5)
    with collected_seldom():
        assert gc.get_threshold() == (meanwhile, 4, 5)
    assert gc.get_threshold() == (own, 4, 5)


def test_every_route_to_a_plan_collects_seldom(
    threshold: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_graph, seen = planner.plan_graph, []
    monkeypatch.setattr(
        planner, "plan_graph", lambda *a, **how: seen.append(gc.get_threshold()[0]) or plan_graph(*a, **how)
    )
    model, batch = small("mlp")
    options = {"memory_limit": "90%", "cost_model": "flops", "workers": 1, "cache": False}
    torch.compile(model, backend="hybridremat", dynamic=False, options=options)(**batch)
    assert seen == [SELDOM] and gc.get_threshold() == threshold


def test_the_last_of_several_that_plan_sets_the_collector_back(threshold: tuple[int, int, int]) -> None:
    one, other = collected_seldom(), collected_seldom()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold()[0] == SELDOM
    other.__exit__(None, None, None)
    assert gc.get_threshold() == threshold


def test_a_threshold_that_is_set_meanwhile_stays() -> None:
    with collected_seldom():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)

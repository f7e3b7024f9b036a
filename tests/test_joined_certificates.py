"""Certificates of steps of several graphs: no plan beats one that was made of another plan of the step."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat import Plan
from hybridremat.analysis.frontier_certify import certify_points
from hybridremat.cli import main as cli
from hybridremat.errors import LimitError
from hybridremat.planning.breaks.frontier import PathFrontier
from support.broken_nets import Reader, batch
from support.towers import NormedTower, tower_batch
from support.wrapping import HOW


def tower(*wide: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    given = tower_batch()
    return NormedTower(*wide), {"kwargs": given, "units": "layers.*", **HOW}


def reader() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Reader(), {"kwargs": batch(), "graph_breaks": "plan", **HOW}


SHARES = ("100%", "75%", "60%", "50%")
STEPS = {
    "alike": lambda: tower(*[64] * 6),
    "two kinds": lambda: tower(64, 96, 64, 96),
    "breaks": reader,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "early": {"gradients": "in_backward"},
    "two": {"forwards": 2},
    "reserve": {"reserve": 9_000},
}


def plans(step: str, **how: Any) -> list[Plan]:
    """Certified plans under a few limits, as far as they are feasible."""
    model, asked = STEPS[step]()
    scale = how.get("forwards", 1)
    limits = [f"{int(share[:-1]) * scale}%" for share in SHARES]
    made = [
        hybridremat.plan(model, memory_limit=each, on_infeasible="least", certify=True, **asked, **how)
        for each in limits
    ]
    assert all(len(plan.places) > 1 for plan in made)
    return made


def assert_none_beats_another(made: list[Plan]) -> None:
    for plan, other in product(made, made):
        assert plan.certificate is not None and other.certificate is not None
        if other.needed <= plan.certificate.limit:
            assert plan.lower_bound <= other.certificate.time
        assert 0 < plan.certificate.least_bound <= other.predicted_peak


@pytest.mark.filterwarnings("ignore:no plan fits")
@pytest.mark.parametrize(
    "step", ["alike", *(pytest.param(name, marks=pytest.mark.slow) for name in ("two kinds", "breaks"))]
)
def test_no_plan_beats_what_is_proven_of_another(step: str) -> None:
    made = plans(step)
    assert_none_beats_another(made)
    assert made[0].optimality_gap < 0.01
    assert all(plan.optimality_gap < 0.1 for plan in made)


@pytest.mark.filterwarnings("ignore:no plan fits")
@pytest.mark.slow
@pytest.mark.parametrize("settings", [*SETTINGS][1:])
def test_bounds_hold_for_every_kind_of_step(settings: str) -> None:
    assert_none_beats_another(plans("two kinds", **SETTINGS[settings]))


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, asked = tower(*[64] * 6)
    return hybridremat.plan(model, memory_limit="60%", certify=True, **asked)


def test_recomputing_is_proven_to_be_needed(plan: Plan) -> None:
    """Each layer alone would fit: the bound is more than each op once."""
    once = sum(
        sum(min(way.time for way in op.ways) for op in plan.parts[place].details.graph.ops)
        for place in plan.places
    )
    assert plan.certificate.time > once
    assert plan.lower_bound > once


def test_it_is_printed_reported_and_kept(plan: Plan, tmp_path, capsys) -> None:
    assert "at best" in str(plan)
    plan.to_html(tmp_path / "plan.html")
    assert "Optimality gap" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    replace(plan, certificate=None).save(tmp_path / "plan.json")
    assert cli.main(["certify", str(tmp_path / "plan.json"), "-o", str(tmp_path / "certified.json")]) == 0
    capsys.readouterr()
    assert Plan.load(tmp_path / "certified.json") == plan
    assert cli.main(["certify", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lower_bound_ns"] == plan.lower_bound


def test_what_cannot_be_certified_says_why(plan: Plan) -> None:
    with pytest.raises(LimitError, match="how they are joined"):
        replace(plan, composition=None).certified(progress=False)
    with pytest.raises(LimitError, match="forward alone"):
        parts = tuple(replace(part, details=None) for part in plan.parts)
        replace(plan, parts=parts).certified(progress=False)
    with pytest.raises(LimitError, match="inductor cannot be certified"):
        replace(plan, request=replace(plan.request, compiler="inductor")).certified(progress=False)


@pytest.mark.slow
def test_a_frontier_is_bounded_from_below() -> None:
    model, asked = reader()
    found = hybridremat.frontier(model, certify=True, **asked)
    overheads = {point.peak: point.overhead for point in found.points}
    assert [each.peak for each in found.bounds] == sorted(overheads)
    for bound, following in zip(found.bounds, found.bounds[1:], strict=False):
        assert following.overhead <= bound.overhead
    assert all(overheads[each.peak] - each.overhead >= -1e-12 for each in found.bounds)
    assert found.bounds[0].overhead > 0
    assert 0 < found.least_bound <= found.least.peak


def test_a_compiled_frontier_has_no_certificate(monkeypatch) -> None:
    monkeypatch.setattr(PathFrontier, "compiler", "inductor")
    with pytest.raises(LimitError, match="of a compiled step cannot be certified"):
        certify_points(object.__new__(PathFrontier), show=False)

"""Certificates of plans and frontiers: what is proven is shown, kept, and never more than a plan reaches."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat import Plan
from hybridremat.analysis.frontier_certify import certify_points
from hybridremat.cli import main as cli
from hybridremat.errors import LimitError
from hybridremat.graph.memory import schedule_time
from hybridremat.planning.compiled_frontier import CompiledFrontier
from hybridremat.plans.certify import require_backward
from hybridremat.plans.records import Certificate
from hybridremat.plans.request import MOVING
from hybridremat.sequence.strategies import STRATEGIES, WholeGraph
from support.nets import Net
from support.training import small
from support.wrapping import HOW, frontier_of


class LanguageModel(nn.Module):
    """Some layers, and a loss over many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(16, 256)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), labels)


def language_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return LanguageModel(), {"x": torch.randn(128, 16), "labels": torch.randint(0, 256, (128,))}


@pytest.fixture(scope="module")
def step():
    return small("transformer")


@pytest.fixture(scope="module")
def plan(step):
    model, batch = step
    return hybridremat.plan(model, kwargs=batch, memory_limit="60%", certify=True, **HOW)


@pytest.fixture(scope="module")
def curve(step):
    model, batch = step
    return hybridremat.frontier(model, kwargs=batch, certify=True, **HOW)


def test_a_plan_knows_how_near_it_is_to_the_best(plan) -> None:
    found = plan.certificate
    assert found.limit == plan.memory_limit
    assert found.time == schedule_time(plan.details.graph, plan.schedule)
    assert 0 < plan.lower_bound <= found.time
    assert plan.optimality_gap == 1 - plan.lower_bound / found.time
    assert plan.optimality_gap < 0.03
    assert 0 < found.least_bound <= plan.least_peak


def test_certificates_are_only_made_on_demand(step, plan) -> None:
    model, batch = step
    bare = hybridremat.plan(model, kwargs=batch, memory_limit="60%", **HOW)
    assert bare.certificate is bare.lower_bound is bare.optimality_gap is None
    assert "at best" not in str(bare)
    again = bare.certified()
    assert again.certificate == plan.certificate
    assert replace(again, certificate=None) == bare


def test_a_wrapped_models_plan_can_be_certified(step) -> None:
    model, batch = small("transformer")
    hybridremat.wrap(model, kwargs=batch, memory_limit="60%", **HOW)
    assert hybridremat.get_plan(model).certified().lower_bound is not None


@pytest.mark.slow
def test_more_is_proven_for_what_the_caller_keeps(step) -> None:
    """A reserve, and further forwards: the backward has less than the limit."""
    model, batch = step
    plain = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW).plain_peak
    for reserve, forwards in ((plain // 5, 1), (0, 2)):
        limit = plain * 2 * forwards
        how = {"reserve": reserve, "forwards": forwards, "memory_limit": limit, "certify": True, **HOW}
        made = hybridremat.plan(model, kwargs=batch, **how)
        assert made.lower_bound <= made.certificate.time
        tight = {**how, "memory_limit": made.least_peak}
        least = hybridremat.plan(model, kwargs=batch, **tight)
        assert made.lower_bound <= least.lower_bound <= least.certificate.time


def test_it_is_printed_and_reported(plan, tmp_path) -> None:
    gap = f"{math.ceil(1000 * plan.optimality_gap) / 10:.1f} %"
    assert f"saves more than {gap} of this time" in " ".join(str(plan).split())
    plan.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "Optimality gap" in page and f"≤ {gap}" in page


def test_what_is_printed_is_never_more_than_is_proven(plan) -> None:
    certified = replace(plan, certificate=Certificate(plan.memory_limit, 10_000, 9_899, 1))
    assert "more than 1.1 %" in " ".join(str(certified).split())


@pytest.mark.slow
def test_a_frontier_is_bounded_from_below(curve) -> None:
    assert len(curve.bounds) == min(25, len(curve.points))
    overheads = {point.peak: point.overhead for point in curve.points}
    for bound, following in zip(curve.bounds, curve.bounds[1:], strict=False):
        assert following.overhead <= bound.overhead
    assert all(overheads[each.peak] - each.overhead >= -1e-12 for each in curve.bounds)
    assert 0 < curve.least_bound <= curve.least.peak
    assert str(curve).count("no schedule below") == len(curve.bounds)
    assert "no schedule goes below" in str(curve)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "strategy",
    [
        name
        for name, each in STRATEGIES.items()
        if name not in ("plain", *MOVING) and not isinstance(each, WholeGraph)  # Checkmate takes minutes
    ],
)
def test_no_strategy_beats_the_bounds_of_the_default(curve, strategy: str) -> None:
    other = frontier_of("transformer", strategy)
    assert other.least.peak >= curve.least_bound
    for point in other.points:
        proven = [each.overhead for each in curve.bounds if each.peak >= point.peak]
        assert point.overhead >= max(proven, default=0.0) - 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"gradients": "in_backward"},
        {"rewrites": "none"},
        {"gradients": "in_backward", "outputs": "loss"},
        {"rewrites": "chunked"},
    ],
    ids=str,
)
def test_bounds_hold_for_every_kind_of_step(settings: dict[str, str]) -> None:
    """Of plans made in two ways, none is below the bounds of the others with as much memory."""
    model, batch = language_model() if "chunked" in settings.values() else small("transformer")
    ours = hybridremat.frontier(model, kwargs=batch, certify=True, **settings, **HOW)
    for strategy in ("hybrid", "rotor"):
        other = hybridremat.frontier(model, kwargs=batch, strategy=strategy, **settings, **HOW)
        assert other.least.peak >= ours.least_bound > 0
        for point in other.points:
            proven = [each.overhead for each in ours.bounds if each.peak >= point.peak]
            assert point.overhead >= max(proven, default=-1.0) - 1e-12
    tight = ours.plan(memory_limit=ours.points[len(ours.points) // 3].peak).certified(progress=False)
    assert 0 <= tight.optimality_gap < 0.2


def test_a_compiled_frontier_has_no_certificate() -> None:
    with pytest.raises(LimitError, match="of a compiled step cannot be certified"):
        certify_points(object.__new__(CompiledFrontier), show=False)


def test_bounds_are_in_every_file(curve, tmp_path) -> None:
    data = curve.to_dict()
    assert data["least_bound_bytes"] == curve.least_bound
    assert [row["peak_bytes"] for row in data["bounds"]] == [each.peak for each in curve.bounds]
    curve.to_csv(tmp_path / "curve.csv")
    with (tmp_path / "curve.csv").open(encoding="utf-8") as file:
        bounds = [float(row["overhead_bound"]) for row in csv.DictReader(file) if row["overhead_bound"]]
    assert bounds == [each.overhead for each in curve.bounds]
    pytest.importorskip("matplotlib")
    labels = [line.get_label() for line in curve.plot().axes[0].get_lines()]
    assert "no schedule is faster" in labels


def test_the_command_certifies_a_file(plan, tmp_path, capsys) -> None:
    source, target = tmp_path / "plan.json", tmp_path / "certified.json"
    replace(plan, certificate=None).save(source)
    assert cli.main(["certify", str(source), "-o", str(target)]) == 0
    assert "at best" in capsys.readouterr().out
    assert Plan.load(target) == plan
    assert cli.main(["certify", str(source), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["lower_bound_ns"] == plan.lower_bound
    assert printed["optimality_gap"] == plan.optimality_gap


@pytest.mark.parametrize("command", ["plan", "frontier"])
def test_planning_commands_certify_if_asked(tmp_path, monkeypatch, capsys, command: str) -> None:
    (tmp_path / "certified_net.py").write_text(
        "import torch\n\ndef make():\n    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())\n"
        "    return net, (torch.ones(4, 8),), {}\n"
    )
    monkeypatch.chdir(tmp_path)
    how = ["--cost-model", "flops", "--workers", "1", "--certify"]
    limit = ["--limit", "100%"] if command == "plan" else []
    assert cli.main([command, "certified_net.py:make", *limit, *how]) == 0
    assert "no schedule" in capsys.readouterr().out


def test_what_has_no_graph_of_its_own_is_refused(plan) -> None:
    with pytest.raises(LimitError, match="inductor cannot be certified"):
        replace(plan, request=replace(plan.request, compiler="inductor")).certified()
    with pytest.raises(LimitError, match="only a step with a backward"):
        replace(plan, details=None).certified()


def test_a_forward_alone_is_refused() -> None:
    net = Net()
    net.layer("layer", [net.input()], 8)
    with pytest.raises(LimitError, match="forward alone"):
        require_backward(net.joint())

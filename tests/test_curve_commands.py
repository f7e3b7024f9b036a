"""``hybridremat frontier``, ``compare`` and ``batch``, called as functions."""

from __future__ import annotations

import csv
import json
import sys
from types import SimpleNamespace

import pytest

import hybridremat
from hybridremat import Plan
from hybridremat.analysis import comparison
from hybridremat.analysis.comparison import Comparison
from hybridremat.cli import main as cli
from hybridremat.cli.targets import load_target
from hybridremat.plans.records import FrontierPoint
from hybridremat.plans.request import MOVING
from hybridremat.sequence.strategies import STRATEGIES, checkmate
from support.wrapping import frontier_of

QUICK = ["--cost-model", "flops", "--workers", "1"]
HOW = {"cost_model": "flops", "workers": 1, "progress": False}
KEEPING = [name for name in STRATEGIES if name not in MOVING]
MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.sum()


def make(batch=64):
    return Net(), {"x": torch.randn(batch, 16)}


def fixed():
    return make()
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("nets", None)


def frontier():
    target = load_target("nets.py:make")
    return hybridremat.frontier(target.model, kwargs=target.kwargs, **HOW)


def failed(capsys, *arguments) -> str:
    assert cli.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hybridremat: ") and err.count("\n") == 1
    return err


def test_frontier_prints_the_curve_and_the_chosen_point(models, capsys):
    assert cli.main(["frontier", "nets.py:make", "--limit", "80%", *QUICK]) == 0
    printed = capsys.readouterr().out
    curve = frontier()
    assert printed.startswith(f"{curve}\n")
    assert "chosen: " in printed and f"({curve.at(memory_limit='80%').peak} bytes" in printed


def test_frontier_writes_every_kind_of_file(models, capsys):
    names = ["curve.png", "curve.svg", "curve.PDF", "curve.csv", "curve.json"]
    outputs = [word for name in names for word in ("-o", name)]
    assert cli.main(["frontier", "nets.py:make", "--max-overhead", "5%", *outputs, *QUICK]) == 0
    assert all((models / name).stat().st_size > 100 for name in names)
    curve = frontier()
    data = json.loads((models / "curve.json").read_text())
    assert data.pop("chosen")["peak_bytes"] == curve.at(max_overhead=0.05).peak
    assert data == curve.to_dict()
    with (models / "curve.csv").open() as file:
        assert sum(row["kind"] == "plan" for row in csv.DictReader(file)) == len(curve.points)


def test_frontier_measures_and_prints_json(models, capsys):
    assert cli.main(["frontier", "nets.py:make", "--measure", "2", "--json", *QUICK]) == 0
    data = json.loads(capsys.readouterr().out)
    plain, *plans = data["measurements"]
    assert plain["predicted_peak_bytes"] is None and len(plans) == 2
    assert [each["measured_peak_bytes"] for each in plans] == [each["predicted_peak_bytes"] for each in plans]
    assert data["chosen"] is None


def test_batch_prints_and_writes_the_plan(models, capsys):
    limit = 40_000
    batch = ["batch", "nets.py:make", "--limit", str(limit), *QUICK]
    assert cli.main([*batch, "--start", "64", "-o", "p.json"]) == 0
    printed = capsys.readouterr().out
    found = hybridremat.max_batch_size(_made, limit, **HOW)
    assert printed == f"{found}\n"
    assert Plan.load("p.json") == found.plan
    assert cli.main([*batch, "--json", "--most", "8"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["batch_size"], data["reached_most"]) == (8, True)
    assert [each["batch"] for each in data["tried"]] == [1, 8]


def _made(batch):
    target = load_target("nets.py:make", changes={"batch": batch})
    return target.model, target.args, target.kwargs


def test_built_in_models_come_in_any_batch():
    target = load_target("unet", changes={"batch": 6})
    assert [len(tensor) for tensor in target.kwargs.values()] == [6, 6]
    assert target.kwargs["x"].shape[1:] == (3, 128, 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frontier", "nets.py:make", "-o", "curve.txt"], "one of .png, .svg, .pdf, .csv, .json"),
        (["frontier", "nets.py:make", "-o", "nowhere/curve.csv"], "there is no folder nowhere"),
        (["frontier", "nets.py:make", "--limit", "0.5"], 'did you mean "50%"?'),
        (["frontier", "nets.py:make", "--max-overhead", "much"], "max_overhead='much' cannot be read"),
        (["frontier", "nets.py:make", "--measure", "0"], "--measure 0"),
        (["frontier", "nets.py:make", "--limit", "10", "-o", "c.png", *QUICK], "the least feasible limit"),
        (["batch", "nets.py:make"], "--limit 6GiB"),
        (["batch", "nets.py:make", "--limit", "50%"], "grows with the batch"),
        (["batch", "nets.py:fixed", "--limit", "6GiB"], "should take an argument named batch"),
        (["batch", "nets.py:make", "--limit", "100", *QUICK], "batch 1 needs"),
        (["batch", "nets.py:make", "--limit", "6GiB", "--start", "0"], "start=0"),
    ],
)
def test_errors_are_one_line_and_leave_no_file(models, capsys, arguments, message):
    assert message in failed(capsys, *arguments)
    assert {path.name for path in models.iterdir()} <= {"nets.py", "__pycache__"}


# compare


def test_compare_prints_every_strategy_under_each_limit(models, capsys):
    files = [word for name in ("all.json", "all.csv", "all.png") for word in ("-o", name)]
    limits = ["--limit", "100%", "--limit", "1KiB"]
    assert cli.main(["compare", "nets.py:make", *QUICK, "-q", *limits, *files]) == 0
    head, titles, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("extra time by cost model flops under a limit; the plain step takes ")
    assert titles.split() == ["strategy", "least", "feasible", "100%", "1KiB"]
    assert [line.split()[0] for line in lines] == KEEPING
    assert all(line.split()[-2:] == ["+0.0%", "–"] for line in lines)

    data = json.loads((models / "all.json").read_text())
    assert data["limits"] == ["100%", "1KiB"]
    by_name = {each["strategy"]: each for each in data["strategies"]}
    assert by_name["hybrid"]["frontier"]["points"] == frontier().to_dict()["points"]
    assert by_name["rotor"]["least"] == by_name["rotor"]["frontier"]["points"][0]
    assert by_name["rotor"]["at"][0]["overhead"] == 0 and by_name["rotor"]["at"][1] is None
    with (models / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    points = [
        (each["strategy"], point["peak_bytes"])
        for each in by_name.values()
        for point in each["frontier"]["points"]
    ]
    assert [(row["strategy"], int(row["peak_bytes"])) for row in rows] == points
    assert (models / "all.png").read_bytes().startswith(b"\x89PNG")


def test_all_strategies_fit_into_one_picture(tmp_path):
    every = dict.fromkeys(STRATEGIES, frontier_of("mlp"))
    Comparison(every, {}, known_points=True).plot(tmp_path / "all.svg")
    assert len(set(comparison.COLORS)) >= len(every)


def test_compare_shows_whole_frontiers_and_says_what_is_left_out(models, capsys, monkeypatch):
    monkeypatch.setattr(checkmate, "MOST_RUNS", 1)
    assert cli.main(["compare", "nets.py:make", *QUICK, "-q", "--frontier", "-o", "all.json"]) == 0
    _, titles, least, *lines, left_out = capsys.readouterr().out.splitlines()
    assert titles.split() == ["strategy", *(name for name in KEEPING if name != "checkmate")]
    assert least.split()[0] == "least" and left_out.startswith('strategy="checkmate" solves the whole graph')
    data = json.loads((models / "all.json").read_text())
    assert data["left_out"] == {"checkmate": left_out}
    assert data["limits"] == [f"{share}%" for share in range(95, 0, -5)]
    hybrid = data["strategies"][0]
    shown = [f"{point['overhead']:+.1%}" if point else "–" for point in hybrid["at"]]
    expected = [list(pair) for pair in zip(data["limits"], shown, strict=True)]
    assert [line.split()[:2] for line in lines] == expected[: len(lines)]
    assert any(each["at"][len(lines) - 1] for each in data["strategies"])
    assert not any(each["at"][len(lines)] for each in data["strategies"])
    by_peak = {point["peak_bytes"]: point["overhead"] for point in hybrid["frontier"]["points"]}
    for point in filter(None, hybrid["at"]):
        assert point["overhead"] == by_peak[point["peak_bytes"]]


def test_known_points_are_the_fastest_under_each_limit():
    points = tuple(FrontierPoint(peak, (100 - peak) / 100, 0.0) for peak in (40, 60, 80, 100))
    made = []

    def planned(memory_limit):
        made.append(memory_limit)
        return points[-1]

    frontier = SimpleNamespace(points=points, least=points[0], plain_peak=100, at=planned, cost_model="flops")

    def peaks(**how):
        rows = Comparison({"only": frontier}, **how).rows(["90%", "79%", "30%"])
        return [at and at["peak_bytes"] for at in rows[0]["at"]]

    assert peaks(known_points=True) == [80, 60, None] and not made
    assert peaks() == [100] * 3 and made == ["90%", "79%", "30%"]


def test_compare_refuses_before_anything_is_planned(models, capsys):
    assert "leave --strategy out" in failed(capsys, "compare", "nets.py:make", "--strategy", "rotor")
    assert "the suffix says what to write" in failed(capsys, "compare", "nets.py:make", "-o", "x.txt")
    assert "memory_limit" in failed(capsys, "compare", "nets.py:make", "--limit", "much")
    both = failed(capsys, "compare", "nets.py:make", "--limit", "50%", "--frontier")
    assert "--limit and --frontier exclude each other" in both

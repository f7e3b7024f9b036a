"""The demo on a model small enough for a test: what it measures, and that it notices what goes wrong."""

import json
from argparse import Namespace
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from hybridremat.analysis.measure import loss_of
from hybridremat.analysis.paired_steps import Subject, differences, train
from hybridremat.cli import demo
from hybridremat.cli import main as cli
from hybridremat.cli.demo_models import DEMO_MODELS, DemoModel
from hybridremat.errors import OutputError, TargetError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        for layer in self.layers:
            x = functional.dropout(functional.gelu(layer(x)), 0.2, self.training)
        return self.norm(x)


class WithLoss(Net):
    def forward(self, x):
        return {"loss": super().forward(x).exp().mean()}


def tiny(kind, loss_fn, *, loss_outside=False):
    def make():
        torch.manual_seed(0)
        return kind(), {"x": torch.randn(256, 16)}, loss_fn

    return DemoModel("tiny", make, loss_outside)


INSIDE = tiny(WithLoss, loss_of)
OUTSIDE = tiny(Net, lambda output: output.exp().mean(), loss_outside=True)


@pytest.fixture(scope="module")
def rows():
    return demo.run_models([INSIDE, OUTSIDE], 2, "flops")


def test_every_row_passes(rows):
    assert len(rows) == 4
    assert [row.differing for row in rows] == [()] * 4
    assert all(row.predicted_peak <= row.needed <= row.limit for row in rows)
    assert all(row.measured_peak <= row.limit for row in rows)
    assert all(row.time_ratio > 0 and row.planning_seconds > 0 for row in rows)


def test_the_prediction_is_exact_where_the_loss_is_inside(rows):
    inside = [row for row in rows if not row.reserve]
    assert len(inside) == 2
    assert all(row.measured_peak == pytest.approx(row.predicted_peak, rel=0.001) for row in inside)


def test_a_loss_outside_gets_a_reserve(rows):
    assert [row.reserve > 0 for row in rows] == [False, False, True, True]


def run(monkeypatch, rows, **options):
    monkeypatch.setattr(demo, "run_models", lambda *_, **__: list(rows))
    given = {"models": None, "steps": 2, "threads": 1, "cost_model": "flops", "device": "cpu"}
    given |= {"json": False, "quiet": False, "quick": False, "output": None}
    return demo.run_demo(Namespace(**{**given, **options}))


def test_the_table_says_what_was_shown(rows, monkeypatch, capsys):
    assert run(monkeypatch, rows) == 0
    text = capsys.readouterr().out
    assert "is equal, bit for bit" in text
    assert text.count("yes") == 4
    assert max(len(line) for line in text.splitlines()) <= 120
    assert run(monkeypatch, rows, json=True) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps([asdict(row) for row in rows]))


def test_a_difference_or_a_passed_limit_is_a_failure(rows, monkeypatch, capsys):
    other = replace(rows[0], differing=("step 1: gradient head",))
    assert run(monkeypatch, [*rows, other]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "1 tensors differ from plain training, the first is step 1: gradient head" in text
    above = replace(rows[0], measured_peak=rows[0].limit + 1)
    assert run(monkeypatch, [*rows, above]) == 1
    assert "above the limit" in capsys.readouterr().out


def test_the_quick_demo_writes_its_report_and_opens_it_where_somebody_looks(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setitem(demo.DEMO_MODELS, "gpt2", INSIDE)
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert run(monkeypatch, [], quick=True, output=str(tmp_path / "new" / "folder")) == 0
    printed = capsys.readouterr()
    report, image = (tmp_path / "new" / "folder" / name for name in ("plan.html", "frontier.png"))
    assert "<html" in report.read_text(encoding="utf-8") and image.read_bytes().startswith(b"\x89PNG")
    assert f"wrote {report}\n" in printed.err and f"wrote {image}\n" in printed.err
    assert printed.out.count("yes") == 1 and opened == []
    monkeypatch.setattr("hybridremat.cli.demo_report.has_display", lambda: True)
    assert run(monkeypatch, [], quick=True, output=str(tmp_path)) == 0
    assert opened == [(tmp_path / "plan.html").as_uri()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quick": True, "models": "gpt2,llama"}, "--quick trains one model, not 2"),
        ({"output": "there"}, "add --quick"),
    ],
)
def test_what_does_not_go_with_quick_is_refused(monkeypatch, options, said):
    with pytest.raises(TargetError, match=said):
        run(monkeypatch, [], **options)


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(demo.ModelDemo, "under", lambda *_: pytest.fail("trained"))
    with pytest.raises(OutputError, match="no folder can be made there"):
        run(monkeypatch, [], quick=True, output=str(tmp_path / "file" / "folder"))


def test_training_that_differs_in_one_bit_is_noticed():
    def trained(change):
        model, batch, loss_fn = INSIDE.make()
        with torch.no_grad():
            model.layers[0].bias[0] += change
        return [tensors for tensors, _ in train(Subject(model, batch, loss_fn), 2)]

    assert [differences(a, b) for a, b in zip(trained(0), trained(0), strict=True)] == [[], []]
    assert "parameter layers.0.bias" in differences(trained(0)[0], trained(1e-7)[0])


def test_the_parser_and_the_demo_know_the_same_models():
    text = " ".join(DEMO_MODELS)
    assert text == "gpt2 resnet50 llama unet"
    options = cli.build_parser()[0].parse_args(["demo"])
    assert (options.models, options.steps, options.cost_model, options.device) == (None, 3, "profile", "cpu")

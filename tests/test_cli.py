"""The commands ``plan`` and ``inspect``, called as functions."""

import json

import pytest

from hybridremat import Plan
from hybridremat.cli import main as cli
from support.command_line import QUICK, failed


def test_plan_prints_writes_and_is_read_again(models, capsys):
    assert cli.main(["plan", f"{models}:make", "--limit", "97%", "-o", "plan.json", *QUICK]) == 0
    printed = capsys.readouterr().out
    plan = Plan.load("plan.json")
    assert f"{plan.predicted_peak} bytes" in printed
    assert plan.predicted_peak <= plan.memory_limit < plan.plain_peak
    assert cli.main(["inspect", "plan.json"]) == 0
    assert capsys.readouterr().out == f"{plan}\n"
    assert cli.main(["inspect", "plan.json", "--block", "0"]) == 0
    assert "addmm" in capsys.readouterr().out
    assert "there is no block 99" in failed(capsys, "inspect", "plan.json", "--block", "99")


def test_pins_are_a_policy(models, capsys):
    pins = ["--pin", "layers.[01]=must_save", "--pin", "*:gelu=must_recompute"]
    assert cli.main(["plan", f"{models}:make", "--limit", "99%", "--json", *pins, *QUICK]) == 0
    kept, remade = json.loads(capsys.readouterr().out)["pins"]
    assert (kept["pattern"], kept["action"], kept["values"]) == ("layers.[01]", "must_save", 2)
    assert (remade["pattern"], remade["action"], remade["values"]) == ("*:gelu", "must_recompute", 4)
    assert cli.main(["inspect", f"{models}:make", "--limit", "99%", *pins, *QUICK]) == 0
    assert "*:gelu must_recompute (4 values" in capsys.readouterr().out


def test_json_is_the_whole_plan(models, capsys):
    assert cli.main(["plan", "mymodels:make_with_args", "--max-overhead", "0.5", "--json", *QUICK]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["memory_limit"] is None
    assert data["overhead"] <= 0.5
    assert len(data["schedule"]["steps"]) >= 10


def test_inspect_plans_a_model_by_itself(models, capsys):
    assert cli.main(["inspect", f"{models}:make", "--limit", "1000000", *QUICK]) == 0
    assert "recomputed values" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "gpt3", "--limit", "50%"], "'gpt3' is no built-in model (gpt2, "),
        (["plan", "gpt3", "--limit", "50%"], "did you mean gpt2?"),
        (["plan", "mymodels.py:nothing", "--limit", "50%"], "mymodels.py has no function 'nothing'"),
        (["plan", "other.py:make", "--limit", "50%"], "there is no file other.py"),
        (["plan", "mymodels.py", "--limit", "50%"], "mymodels.py is a file: name the function in it"),
        (["inspect", "nothing.json"], "nothing.json: No such file or directory"),
        (["plan", "no_such_module_here:make", "--limit", "50%"], "there is no module 'no_such_module_here'"),
        (["plan", "mymodels.py:wrong", "--limit", "50%"], "it returned Net"),
        (["plan", "mymodels.py:frozen", "--limit", "50%"], "no trainable parameters"),
        (["plan", "mymodels.py:make"], "--limit 6GiB"),
        (["plan", "mymodels.py:make", "--limit", "0.5"], 'did you mean "50%"?'),
        (["plan", "mymodels.py:make", "--limit", "10", *QUICK], "the least feasible limit"),
        (["plan", "mymodels.py:make", "--max-overhead", "much"], "max_overhead='much' cannot be read"),
        (["plan", "mymodels.py:make", "--limit", "50%", "--cost-model", "guess"], "guess"),
        (["plan", "mymodels.py:make", "--limit", "50%", "--pin", "layers"], "'' is no pattern"),
        (["plan", "mymodels.py:make", "--limit", "50%", "--pin", "layers=keep"], "'keep' is neither"),
        (["plan", "mymodels.py:make", "--limit", "50%", "--pin", "lawyers=must_save", *QUICK], "'layers'"),
        (
            ["plan", "mymodels.py:make", "--limit", "50%", "--pin=*=must_save", "--pin=*=must_recompute"],
            "'*' is pinned twice",
        ),
        (["inspect", "missing.json"], "missing.json"),
        (["inspect", "mymodels.py"], "mymodels.py: not a plan: it is not JSON"),
        (["inspect", "missing.json", "--set", "a=1"], "missing.json is a plan already made: --set cannot"),
        (["frontier", "gpt2", "--measure", "2", "--device-spec", "t4"], "--measure runs plans here"),
        (["demo", "--models", "gpt2,gpt9"], "no demo model gpt9; there are gpt2, resnet50, llama"),
        (["demo", "--steps", "0"], "--steps"),
    ],
)
def test_errors_are_one_line_and_status_two(models, capsys, arguments, message):
    assert message in failed(capsys, *arguments)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("no/such/folder/p.json", "there is no folder no/such/folder; make it first"),
        (".", "that is a folder"),
        ("/proc/p.json", "no file can be written in /proc"),  # refuses even root
    ],
)
def test_a_place_that_takes_no_file_is_told_before_planning(models, capsys, monkeypatch, output, message):
    monkeypatch.setattr("hybridremat.cli.plan.load", lambda _: pytest.fail("the model was made"))
    assert message in failed(capsys, "plan", "mymodels.py:make", "--limit", "50%", "-o", output)


def test_nothing_is_left_beside_the_file(models, tmp_path):
    before = {*tmp_path.iterdir()}
    assert cli.main(["plan", f"{models}:make", "--limit", "97%", "-o", "plan.json", *QUICK]) == 0
    made = {path.name for path in {*tmp_path.iterdir()} - before}
    assert made - {"__pycache__"} == {"plan.json"}


def test_a_mistyped_limit_is_told_before_a_model_is_made(models, capsys, monkeypatch):
    monkeypatch.setattr("hybridremat.cli.plan.load", lambda _: pytest.fail("the model was made"))
    assert "cannot be read" in failed(capsys, "plan", "mymodels.py:make", "--limit", "6 GiBs")


def test_what_the_caller_does_is_told_on_the_command_line(models, capsys):
    asked = ["plan", f"{models}:make", "--limit", "1KiB", "--json", *QUICK]
    assert cli.main([*asked, "--on-infeasible", "least"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["memory_limit"] == alone["least_peak"] > alone["asked_limit"] == 1024
    assert cli.main([*asked, "--on-infeasible", "least", "--forwards", "2", "--hold-outputs"]) == 0
    pair = json.loads(capsys.readouterr().out)
    assert pair["request"]["forwards"] == 2 and pair["memory_limit"] > alone["memory_limit"]
    assert pair["request"]["hold_outputs"]
    assert cli.main([*asked, "--graph-breaks", "never"]) == 2
    assert "graph_breaks='never' is not known" in capsys.readouterr().err

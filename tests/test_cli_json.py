"""With ``--json`` the standard output holds one JSON value and nothing else, whatever happens."""

import json
import subprocess
import sys

import pytest

from hybridremat import Plan
from hybridremat.cli import main as cli
from support.command_line import QUICK


def test_what_the_users_code_prints_goes_elsewhere(models):
    words = ["plan", f"{models}:chatty", "--limit", "99%", "--json", *QUICK]
    command = [sys.executable, "-m", "hybridremat", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["memory_limit"] > 0
    for text in ("from Python", "from below", "from a child"):
        assert text in done.stderr


def test_without_json_it_stays_where_it_was_printed(models, capfd):
    assert cli.main(["plan", f"{models}:chatty", "--limit", "99%", *QUICK]) == 0
    assert "from below" in capfd.readouterr().out


def test_the_json_of_a_plan_is_what_its_file_holds(models, capsys):
    words = [f"{models}:make", "--limit", "97%", "--json", *QUICK]
    assert cli.main(["plan", *words, "-o", "plan.json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == Plan.load("plan.json").to_dict()
    assert cli.main(["inspect", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == printed


def test_an_infeasible_limit_carries_its_figures(models, capsys):
    assert cli.main(["plan", f"{models}:make", "--limit", "10", "--json", *QUICK]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["error"] == "InfeasibleLimitError"
    assert told["limit"] == 10 < told["least"]
    assert str(told["least"]) in told["message"]
    assert err == f"hybridremat: {told['message']}\n"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["plan", "mymodels.py:make"], "TargetError"),
        (["plan", "mymodels.py:make", "--limit", "0.5"], "LimitError"),
        (["plan", "mymodels.py:make", "--limt", "5"], "UsageError"),
        (["plan", "mymodels.py:make", "--limit", "9", "-o", "no/p.json"], "OutputError"),
        (["plan", "mymodels.py:make", "--limit", "9", "--device-spec", "abacus"], "DeviceSpecError"),
        (["inspect", "missing.json"], "FileNotFoundError"),
        (["plam"], "UsageError"),
    ],
)
def test_every_error_is_told_in_both_ways(models, capsys, words, kind):
    assert cli.main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["error"] == kind
    assert err.endswith(f"hybridremat: {told['message']}\n")


def test_the_traceback_of_a_verbose_error_is_no_part_of_the_json(models, capsys):
    assert cli.main(["plan", "mymodels.py:broken", "--limit", "50%", "--json", "-v"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] == "TargetError"
    assert "Traceback" in err

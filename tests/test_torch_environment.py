"""What ``make test-torch`` installs beside another release of torch (``tools/torch_environment.py``)."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import pytest
import torch_environment
from torch_environment import name_of

ROOT = Path(__file__).parents[1]


def test_everything_that_the_tests_need_is_installed_but_for_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {*map(name_of, project["dependencies"]), *map(name_of, project["optional-dependencies"]["dev"])}
    needed = {*map(name_of, torch_environment.requirements())}
    assert needed >= named - {"torch", "hybridremat"}
    assert needed.isdisjoint({"torch", "hybridremat"})


def test_versions_are_those_of_the_constraints_but_for_what_torch_chooses():
    pinned = {*map(name_of, torch_environment.constraints())}
    assert {"ortools", "transformers", "pytest"} <= pinned
    assert pinned.isdisjoint({"torch", "setuptools"})


def test_torch_alone_comes_from_the_further_index_and_its_range_is_not_looked_at(tmp_path, monkeypatch):
    runs, constrained = [], []

    def run(words, check, env):
        runs.append([*map(str, words)])
        constrained.append(env["PIP_CONSTRAINT"])

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setenv("PIP_CONSTRAINT", "of this machine")
    monkeypatch.setattr(torch_environment.venv, "create", lambda folder, with_pip: folder.mkdir())
    torch_environment.set_up(tmp_path / "env", "2.11.0", "https://index")
    torch, others, package = runs
    assert "torch==2.11.0" in torch
    assert torch[torch.index("--extra-index-url") + 1] == "https://index"
    assert "--extra-index-url" not in others
    assert "--no-deps" in package
    assert package[-1] == str(ROOT)
    listed = tmp_path / "env" / "constraints.txt"
    assert "torch==2.11.0" in listed.read_text(encoding="utf-8").splitlines()
    assert constrained == [str(listed)] * 3


@pytest.mark.parametrize(("target", "bound"), [("test-oldest", r">=([\d.]+)"), ("test-newest", r"<2\.(\d+)")])
def test_the_ends_of_the_range_are_those_that_ci_runs(target, bound):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (asked,) = (needed for needed in project["dependencies"] if name_of(needed) == "torch")
    end = re.search(bound, asked)[1]
    release = f"2.{int(end) - 1}" if target == "test-newest" else end
    shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f".torch/{release}.0/bin/python -m pytest" in shown.stdout
    assert target in (ROOT / ".ci" / "run").read_text(encoding="utf-8")

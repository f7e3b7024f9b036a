"""What ``make test-torch`` installs beside another release of torch (``tools/torch_environment.py``)."""

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

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
    runs = []
    monkeypatch.setattr("subprocess.run", lambda words, **_: runs.append([*map(str, words)]))
    monkeypatch.setattr(torch_environment.venv, "create", lambda folder, with_pip: folder.mkdir())
    torch_environment.set_up(tmp_path / "env", "2.11.0", "https://index")
    torch, others, package = runs
    assert "torch==2.11.0" in torch
    assert torch[torch.index("--extra-index-url") + 1] == "https://index"
    assert "--extra-index-url" not in others
    assert "--no-deps" in package
    assert package[-1] == str(ROOT)
    assert "torch==2.11.0" in (tmp_path / "env" / "constraints.txt").read_text(encoding="utf-8").splitlines()

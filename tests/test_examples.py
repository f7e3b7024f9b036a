"""The scripts of ``examples/`` that need one process run, on small sizes, and keep their limits."""

import ast
import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
LINES = 60
PEAK = re.compile(r"takes ([\d,]+) of ([\d,]+) bytes")
SIZES = {
    "trainer_lora.py": "4 2 64",
    "trl_sft.py": "3 2 32",
    "lightning_callback.py": "3",
    "plain_loop.py": "output 2",
    "offload.py": "16 128 8",
    "device_not_here.py": "2 128 128",
}
"""What each script is given, so that it is over soon."""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in an empty folder, as its own main program, and returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)

    def run_script(name):
        monkeypatch.setattr(sys, "argv", [name, *SIZES[name].split()])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def limits_kept(text):
    """Of each line that tells of a step, whether it is within its limit."""
    return [int(peak.replace(",", "")) <= int(limit.replace(",", "")) for peak, limit in PEAK.findall(text)]


@pytest.mark.slow
def test_the_trainer_plans_both_lengths(run):
    assert limits_kept(run("trainer_lora.py")) == [True, True]


@pytest.mark.slow
def test_trl_trains_within_the_limit(run):
    from support.compat import packages  # noqa: F401 (makes what `make compat` installs importable)

    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: make compat")
    assert limits_kept(run("trl_sft.py")) == [True]


@pytest.mark.slow
def test_lightning_trains_within_the_limit(run):
    text = run("lightning_callback.py")
    assert limits_kept(text) == [True] and "measured: " in text


@pytest.mark.slow
def test_the_plain_loop_goes_on_where_it_was(run):
    text = run("plain_loop.py") + run("plain_loop.py")
    assert re.findall(r"^step (\d)", text, re.MULTILINE) == ["0", "1", "2", "3"]
    assert limits_kept(text) == [True, True]


@pytest.mark.slow
def test_values_wait_elsewhere_under_less_than_the_least(run):
    text = run("offload.py")
    least, moving = re.search(r"limit is ([\d,]+) bytes, and ([\d,]+)", text).groups()
    assert int(moving.replace(",", "")) < int(least.replace(",", ""))
    assert limits_kept(text) == [True]
    assert int(re.search(r"([\d,]+) wait elsewhere", text)[1].replace(",", "")) > 0


@pytest.mark.slow
def test_a_model_is_planned_for_a_device_that_is_not_here(run):
    assert re.search(r"fits with(out)? a plan: .* left for the step on h100", run("device_not_here.py"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_scripts_are_short_and_say_how_they_are_started(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= LINES
    if "__main__" in text:
        assert f"examples/{path.name}" in ast.get_docstring(ast.parse(text))


def test_every_script_of_one_process_is_run_here():
    alone = {path.name for path in FOLDER.glob("*.py") if "main(*" in path.read_text(encoding="utf-8")}
    assert alone == set(SIZES)

"""``make gpu`` without a GPU: its parts, their time, and what it needs on a machine without network."""

import json
import re
import sys
import time
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import gpu_environment
import gpu_run

from support.command_line import alive

ROOT = Path(__file__).parents[1]
STARTS_ANOTHER = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("started", other.pid, flush=True)
time.sleep(100)
"""


def names(requirements):
    return {re.split(r"[<>=!~\\[ ]", name)[0] for name in requirements}


def test_all_that_is_needed_is_named_and_no_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = names(gpu_environment.needed())
    assert needed == names(project["dependencies"]) - {"torch"} | {"pytest", "hypothesis", "setuptools"}


def test_the_wheels_are_those_that_are_needed_and_pinned():
    listed = (ROOT / "tools" / "gpu_wheels.txt").read_text(encoding="utf-8").splitlines()
    collected = {name for name in listed if name and not name.startswith("#")}
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert names(gpu_environment.needed()) - {"numpy"} <= collected <= names(pinned)


def test_a_part_is_ended_in_its_time_with_all_that_it_started(tmp_path):
    with (tmp_path / "log").open("w") as log:
        status, text = gpu_run.run([sys.executable, "-c", STARTS_ANOTHER], 3.0, log, {})
    assert status == "stopped after 3 s"
    assert (tmp_path / "log").read_text() == text
    other = int(text.split()[1])
    for _ in range(100):  # it is gone once its parent's parent has noticed
        if not alive(other) or "State:\tZ" in Path(f"/proc/{other}/status").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the process that the part had started is still there")


@pytest.mark.parametrize(("code", "status"), [("print(1)", "passed"), ("raise SystemExit(3)", "failed (3)")])
def test_how_a_part_ended(code, status, tmp_path):
    with (tmp_path / "log").open("w") as log:
        assert gpu_run.run([sys.executable, "-c", code], 60.0, log, {})[0] == status


def test_the_doctors_json_is_kept_without_what_is_printed_beside_it(tmp_path):
    found = {"ok": True, "checks": [{"name": "torch"}]}
    text = f"a warning\n{json.dumps(found, indent=1)}\nanother {{one}}\n"
    gpu_run.keep_doctor(text, tmp_path)
    assert json.loads((tmp_path / "doctor.json").read_text()) == found
    gpu_run.keep_doctor(json.dumps(found, indent=1) + "\n", tmp_path)
    gpu_run.keep_doctor("nothing of the kind", tmp_path)
    assert json.loads((tmp_path / "doctor.json").read_text()) == found


def test_without_a_device_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_run, "has_cuda", lambda: False)
    assert gpu_run.main(["--out", str(tmp_path)]) == gpu_run.NO_DEVICE
    assert "make gpu DEVICE=cpu" in capsys.readouterr().out


def test_every_part_runs_and_its_result_stays_whatever_the_others_do(monkeypatch, tmp_path):
    ran = []

    def run(command, seconds, log, environment):
        ran.append((" ".join(command), seconds, environment["PYTORCH_ALLOC_CONF"]))
        return ("failed (1)" if "pytest" in command else "passed"), ""

    monkeypatch.setattr(gpu_run, "has_cuda", lambda: True)
    monkeypatch.setattr(gpu_run, "make_environment", lambda *_: Path("python"))
    monkeypatch.setattr(gpu_run, "run", run)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert gpu_run.main(["--out", str(tmp_path), "--benchmark-args=--resume"]) == 1
    parts = {part["name"]: part["status"] for part in json.loads((tmp_path / "summary.json").read_text())}
    assert parts == {"setup": "passed", "doctor": "passed", "tests": "failed (1)", "benchmark": "passed"}
    (doctor, tests, benchmark), seconds = (command for command, _, _ in ran), [s for _, s, _ in ran]
    assert "doctor --json --device cuda" in doctor and "-m cuda" in tests
    assert "--device cuda" in benchmark and benchmark.endswith("--resume") and "--small" not in benchmark
    assert max(seconds) <= 600 - gpu_run.CLOSING and {setting for *_, setting in ran} == {gpu_run.ALLOCATOR}


def test_where_packages_are_missing_it_says_what_to_do(monkeypatch, capsys, tmp_path):
    def missing(*_):
        raise gpu_environment.SetupError("no ortools: collect them with `make gpu-wheels`")

    monkeypatch.setattr(gpu_run, "make_environment", missing)
    assert gpu_run.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "make gpu-wheels" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())[0]["status"] == "failed"

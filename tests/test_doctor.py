"""``hybridremat doctor``: what it finds; what fails is told with what to do, never by a traceback."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from hybridremat.cli import doctor, doctor_steps, doctor_tools, doctor_versions
from hybridremat.cli import main as cli
from hybridremat.cli.doctor_checks import FAILED, MISSING, OK, SKIPPED, Check, checked

GIB = 1 << 30


def told(capsys, *words: str) -> tuple[int, dict[str, dict]]:
    """The exit status, and the checks of ``--json`` by name."""
    status = cli.main(["doctor", "--json", *words])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (status == 0)
    return status, {check["name"]: check for check in found["checks"]}


@pytest.fixture
def no_steps(monkeypatch):
    """The steps are not run, and succeed."""
    monkeypatch.setattr(doctor, "_step", lambda _, device: Check("step", OK, f"ran on {device}"))


def test_what_it_says_of_this_machine(capsys):
    status, checks = told(capsys, "--no-compile", "--device", "cpu")
    assert status == 0, checks
    assert checks["torch"]["figures"]["version"] == torch.__version__
    assert "ortools" in checks["packages"]["figures"]
    step = checks["step, cpu"]["figures"]
    assert step["bit_equal"] is True
    assert 0 < step["measured_peak"] == step["predicted_peak"] <= step["limit"] < step["plain_peak"]
    assert f"in all: {step['in_all']}" in checks["step, cpu"]["found"]
    assert step["in_all"].startswith("parameters ") and "state of adamw" in step["in_all"]
    compiled = checks["compiled step, cpu"]
    assert (compiled["status"], compiled["found"]) == (SKIPPED, "--no-compile")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
def test_the_compiled_step():
    found = doctor_steps.try_compiled_step("cpu")
    assert found.status == OK, found
    assert found.figures["measured_peak"] <= found.figures["limit"]
    assert found.figures["measured_peak"] == pytest.approx(found.figures["predicted_peak"], rel=0.02)
    assert 0 < found.figures["error"] < doctor_steps.CLOSE


def test_as_a_table(capsys, no_steps):
    assert cli.main(["doctor", "-q"]) == 0
    out = capsys.readouterr().out
    assert "All that should work here works." in out
    assert "ran on" in out and torch.__version__ in out


def test_what_fails_is_told_with_what_to_do(capsys, monkeypatch, no_steps):
    def broken():
        raise OSError("libcudart is\nnot there")

    monkeypatch.setitem(doctor._LOOKS, "Triton", (broken, "install it"))
    assert cli.main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "OSError: libcudart is not there" in out and "→ install it" in out
    assert "Failed: Triton." in out
    assert "Traceback" not in out + err
    status, checks = told(capsys)
    assert (status, checks["Triton"]["status"]) == (1, FAILED)


def test_without_torch_the_steps_are_skipped(capsys, monkeypatch):
    def broken():
        raise ImportError("no module torch")

    monkeypatch.setitem(doctor._LOOKS, "torch", (broken, ""))
    monkeypatch.setitem(doctor._LOOKS, "device", (broken, ""))
    status, checks = told(capsys)
    assert status == 1
    assert [checks[name]["status"] for name in ("step, cpu", "compiled step, cpu")] == [SKIPPED, SKIPPED]


def test_without_a_compiler_only_that_step_is_skipped(capsys, monkeypatch, no_steps):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor_tools.shutil, "which", lambda _: None)
    status, checks = told(capsys, "--device", "cpu")
    assert (status, checks["C++ compiler"]["status"]) == (0, MISSING)
    assert checks["step"]["found"] == "ran on cpu"
    assert checks["compiled step, cpu"]["found"] == "there is no C++ compiler"


def test_a_compiler_that_does_not_work_has_failed(monkeypatch):
    monkeypatch.setenv("CXX", "false")
    found = checked("C++ compiler", doctor_tools.look_at_cxx, "advice")
    assert (found.status, found.advice) == (FAILED, "advice")
    assert "false failed with 1" in found.found


@pytest.fixture
def unplanned(monkeypatch):
    """The net of the step is left plain; the figures of its plan, which a test may change."""
    figures = {"limit": 4096, "predicted_peak": 4000, "measured_peak": 4096, "plain_peak": 8000}
    figures["in_all"] = "all of it"
    monkeypatch.setattr(doctor_steps, "_wrapped", lambda *_, **__: None)
    monkeypatch.setattr(doctor_steps, "_figures", lambda *_: figures)
    return figures


@pytest.mark.slow
def test_numbers_that_differ_have_failed(monkeypatch, unplanned):
    assert doctor_steps.try_step("cpu").status == OK
    monkeypatch.setattr(doctor_steps, "differences", lambda *_: ["gradient head.weight"])
    found = doctor_steps.try_step("cpu")
    assert found.status == FAILED and "2 tensors differ" in found.found
    assert found.figures["bit_equal"] is False


@pytest.mark.slow
def test_gradients_that_are_off_have_failed(monkeypatch, unplanned):
    assert doctor_steps.try_compiled_step("cpu").status == OK
    monkeypatch.setattr(doctor_steps, "_error", lambda *_: float("nan"))
    assert doctor_steps.try_compiled_step("cpu").status == FAILED


def test_a_peak_above_the_limit_has_failed(unplanned):
    unplanned["measured_peak"] += 1
    found = doctor_steps.try_step("cpu")
    assert found.status == FAILED and "above the limit" in found.found


@pytest.mark.parametrize(("asked", "status"), [(">=99", FAILED), (">=2", OK), (None, OK)])
def test_a_version_of_torch_outside_the_range(monkeypatch, asked, status):
    monkeypatch.setattr(doctor_versions, "_range_of_torch", lambda: asked)
    assert doctor_versions.look_at_torch().status == status


def test_a_driver_that_torch_cannot_use_has_failed(monkeypatch):
    monkeypatch.setattr(doctor_versions, "_driver", lambda: "580.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor_versions.look_at_devices()
    assert found.status == FAILED and "driver (580.1)" in found.found


def test_cuda_devices(monkeypatch):
    about = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(doctor_versions, "_driver", lambda: "580.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * GIB, 139 * GIB))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = doctor_versions.look_at_devices()
    assert (found.status, found.figures["kind"]) == (OK, "cuda")
    device = "0: NVIDIA H200, capability 9.0, 100.0 GiB of 139.0 GiB free"
    for part in (device, "580.1", "expandable_segments:True"):
        assert part in found.found, found.found


def test_another_device_is_refused(capsys):
    assert cli.main(["doctor", "--device", "tpu"]) == 2
    assert "--device tpu: give cpu or cuda" in capsys.readouterr().err


def test_a_folder_that_is_deleted_meanwhile_has_no_bytes(tmp_path, monkeypatch):
    for name in ("kept", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"1234")
    scandir = os.scandir

    def deleting(path):
        if os.fspath(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deleting)
    assert doctor_tools._size(tmp_path) == 4
    assert doctor_tools._size(tmp_path / "never") == 0

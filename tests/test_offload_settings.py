"""What ``offload=`` plans with: rates of the link, stores that are used again, what it is refused for."""

from __future__ import annotations

import json
import os

import pytest

import hybridremat
from hybridremat.compiler.offload import rates
from hybridremat.compiler.offload.targets import Target
from hybridremat.graph.costs.device_specs import DEVICE_SPECS, device_spec
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.planning.moving import moving_of
from hybridremat.planning.settings import Settings
from hybridremat.sequence.offload.link import Link
from support.training import small
from support.wrapping import HOW


def test_rates_are_measured_once_and_planned_with_a_part_of_them(tmp_path, monkeypatch):
    store, target, taken = KernelStore(), Target(str(tmp_path)), []
    times = [10**7, 2 * 10**7, 2 * 10**7, 10**6]
    monkeypatch.setattr(rates, "_times", lambda *given: taken.append(given) or times)
    settings = Settings(memory_limit="80%", offload=f"file:{tmp_path}", host_memory_limit=4096)
    for _ in range(2):
        moving = moving_of(settings, "cpu", store)
        out = (64 << 20) / 1e7 * 1e9
        assert moving.link.out == pytest.approx(0.85 * out)
        assert moving.link.back == pytest.approx(0.85 * out / 2)
        assert moving.link.latency == 10**6 - 10**7 // 64 and moving.link.duplex
        assert moving.target == target and moving.host_limit == 4096
    assert len(taken) == 1


def test_real_copies_can_be_timed(tmp_path):
    found = rates.measured_rates(Target(str(tmp_path)), "cpu", KernelStore())
    assert found.out > 0 and found.back > 0 and found.latency >= 0


def test_a_spec_brings_its_link(tmp_path):
    spec = DEVICE_SPECS["h100"]
    found = moving_of(Settings(memory_limit="80%", offload="host", device_spec=spec), "cpu", KernelStore())
    assert (found.link.out, found.link.back) == (0.85 * 50e9, 0.85 * 50e9)
    file = tmp_path / "mine.json"
    rest = {"name": "mine", "bandwidth": 1e11, "memory": 10**6}
    rest |= dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1e12)
    file.write_text(json.dumps({**rest, "host_out": 3e9, "duplex": False}))
    read = device_spec(file)
    assert (read.host_out, read.host_in, read.duplex) == (3e9, 25e9, False)
    file.write_text(json.dumps({**rest, "duplex": 0}))
    with pytest.raises(hybridremat.DeviceSpecError, match="give true or false"):
        device_spec(file)


def test_one_file_serves_step_after_step(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridremat.planning.moving.NOMINAL", Link(1e15, 1e15, latency=0))
    made, allocate = [], os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: made.append(given) or allocate(*given))
    model, batch = small("transformer")
    hybridremat.wrap(model, kwargs=batch, memory_limit="70%", offload=f"file:{tmp_path}", **HOW)
    plan = hybridremat.get_plan(model)
    for _ in range(4):
        model(**batch)["loss"].backward()
    assert [size for _, _, size in made] == [plan.host_bytes]

"""The benchmark for GPUs: which stage comes when, what is written, and a dry run of one model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu
from gpu_child import read_records
from gpu_methods import METHODS
from gpu_models import BENCHES
from gpu_schedule import Stage, batch_of, ended, in_order, limit_for, not_reached, seconds_for
from gpu_table import COLUMNS, markdown_of, rows_of

ROOT = Path(__file__).parents[1]
GIB = 1 << 30


def test_the_first_models_get_many_methods_and_the_first_methods_many_models():
    stages = in_order(["a", "b", "c"], ["eager", "ours", "other"])
    assert [stage.name for stage in stages][:6] == [
        "a/eager", "a/ours", "b/eager", "a/other", "b/ours", "c/eager"
    ]  # fmt: skip
    assert len(set(stages)) == 9
    firsts = [stages.index(Stage(model, "eager")) for model in "abc"]
    assert all(stages.index(Stage(m, "other")) > first for m, first in zip("abc", firsts, strict=True))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=50), st.floats(0, 1000), st.floats(0, 20))
def test_a_stage_gets_at_least_what_it_needs_and_never_more_than_is_left(least, left, reserve):
    seconds = seconds_for(least, left, reserve)
    if left - reserve < least[0]:
        assert seconds == 0
    else:
        assert least[0] <= seconds <= left - reserve


def test_a_stage_among_many_gets_a_few_times_its_share():
    assert seconds_for([10] * 20, 400.0) == 40.0
    assert seconds_for([10], 400.0) == 400.0
    assert seconds_for([10] * 400, 400.0) == 10.0


def record(model, method, kind, **figures):
    return {"model": model, "method": method, "kind": kind, **figures}


RECORDS = [
    record("a", "eager", "start", model_title="A"),
    record("a", "eager", "batch", batch=8, largest=10),
    record("a", "eager", "figures", peak=4 * GIB),
    record("a", "eager", "end", status="done"),
    record("a", "ours", "start"),
    record("a", "ours", "figures", peak=2 * GIB, limit=3 * GIB, ratio=1.25, rate=1234.5),
    record("a", "ours", "end", status="stopped", why="ended after 9 s"),
]


def test_rows_hold_what_a_stage_wrote_before_it_was_ended():
    eager, ours = rows_of(RECORDS)
    assert (eager["batch"], eager["largest"], eager["peak_of_eager"]) == (8, 10, 1.0)
    assert (ours["peak_of_eager"], ours["status"], ours["why"]) == (0.5, "stopped", "ended after 9 s")
    again = [*RECORDS, record("a", "ours", "start")]
    assert rows_of(again)[1]["status"] == "running" and "peak" not in rows_of(again)[1]


def test_the_markdown_has_every_row_and_names_what_is_missing():
    text = markdown_of(rows_of(RECORDS), {"GPU": "NVIDIA H200"}, ["b/eager"])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2 and all(line.count("|") == len(COLUMNS) + 1 for line in lines)
    cells = [cell.strip() for cell in lines[-1].split("|")]
    assert cells[1:3] == ["a", "ours"] and {"2.00 GiB", "50.0%", "1.250", "1,234", "–"} <= set(cells)
    for part in ("NVIDIA H200", "Not reached: b/eager.", "a/ours: ended after 9 s"):
        assert part in text


def test_what_is_done_is_not_done_again():
    stages = in_order(["a", "b"], ["eager", "ours"])
    assert ended(RECORDS) == {Stage("a", "eager")}
    assert not_reached(stages, {Stage("a", "ours")}, RECORDS) == [Stage("b", "eager"), Stage("b", "ours")]
    assert (batch_of("a", RECORDS), batch_of("b", RECORDS)) == (8, None)


def test_all_plans_of_a_model_have_the_same_limit():
    assert limit_for("a", "50%", RECORDS) == 2 * GIB
    assert limit_for("a", "6GiB", RECORDS) == "6GiB"
    assert limit_for("b", "50%", RECORDS) == "50%"  # its eager stage has no peak: a share of the plain step


class Process:
    """Stands in for the process of a stage: ``b`` fails in eager, ``ours`` of ``a`` does not end."""

    returncode = 1
    orders: ClassVar[list[dict]] = []
    open: ClassVar[set[int]] = set()

    @staticmethod
    def start(records, log):
        child = gpu.Child(Process())
        Process.open.add(id(child))
        child.run = lambda order: [Process.run(order, records), child.end()][0]
        child.end = lambda: Process.open.discard(id(child))
        return child

    @staticmethod
    def run(order, path):
        Process.orders.append(order)
        model, method = order["model"], order["method"]
        lines = [record(model, method, "start")]
        if model == "resnet50":
            lines.append(record(model, method, "end", status="failed", why="OutOfMemoryError"))
        elif method == "eager":
            lines += [record(model, method, "batch", batch=3), record(model, method, "end", status="done")]
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        return method != "ours"


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(gpu.Child, "start", Process.start)
    monkeypatch.setattr(Process, "orders", [])
    yield
    assert Process.open == set()  # none is left, also of those that were started ahead


def run(tmp_path, *more):
    words = ["--device", "cpu", "--small", "--out", str(tmp_path), "--models", "gpt2,resnet50"]
    status = gpu.main([*words, "--methods", "eager,ours", *more])
    return status, json.loads((tmp_path / "benchmark.json").read_text())


def test_what_fails_or_does_not_end_stands_in_the_results(tmp_path, stand_in, capsys):
    status, found = run(tmp_path)
    rows = {(row["model"], row["method"]): row for row in found["rows"]}
    assert status == 1
    assert rows["gpt2", "eager"]["status"] == "done"
    assert rows["gpt2", "ours"]["status"] == "stopped" and "ended after" in rows["gpt2", "ours"]["why"]
    assert rows["resnet50", "eager"]["why"] == "OutOfMemoryError"
    assert found["not_reached"] == ["resnet50/ours"]  # there is no batch to compare at
    assert "Not reached: resnet50/ours." in capsys.readouterr().out
    assert [order["batch"] for order in Process.orders] == [None, 3, None]
    assert "resnet50/eager: OutOfMemoryError" in (tmp_path / "benchmark.md").read_text()


def test_on_a_gpu_processes_are_started_ahead(tmp_path, stand_in, monkeypatch):
    started = []

    def start(records, log):
        started.append(len(Process.orders))
        return Process.start(records, log)

    monkeypatch.setattr(gpu.Child, "start", start)
    run(tmp_path, "--device", "cuda")
    assert [order["model"] for order in Process.orders] == ["gpt2", "gpt2", "resnet50"]
    assert started == [0, 0, 1, 2]


def test_resume_goes_on_with_what_is_missing(tmp_path, stand_in):
    run(tmp_path)
    with (tmp_path / "benchmark.jsonl").open("a") as file:
        file.write('{"model": "gpt2", "meth')  # of a process that was ended as it wrote
    assert len(read_records(tmp_path / "benchmark.jsonl")) == 7
    Process.orders.clear()
    run(tmp_path, "--resume")
    assert [(order["model"], order["method"]) for order in Process.orders] == [
        ("gpt2", "ours"),
        ("resnet50", "eager"),
    ]
    assert len(read_records(tmp_path / "benchmark.jsonl")) == 7 + 2 + 2


def test_without_time_nothing_is_reached_and_all_is_named(tmp_path, stand_in):
    status, found = run(tmp_path, "--seconds", "1")
    assert status == 0 and Process.orders == [] and found["rows"] == []
    assert len(found["not_reached"]) == 4


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="there is no such name; there are gpt2"):
        gpu.main(["--device", "cpu", "--models", "gpt5", "--out", str(tmp_path)])


def test_models_and_methods_have_what_the_issue_asks_for():
    assert {"gpt2", "gpt2xl", "llama1b", "resnet50", "resnet152", "vitl", "unet"} == set(BENCHES)
    assert next(iter(METHODS)) == "eager"
    assert {method.compiler for method in METHODS.values()} == {"", "eager", "inductor"}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BENCHES))
def test_small_models_can_be_made_and_have_layers_to_checkpoint(name):
    model, batch = BENCHES[name].make(2, "cpu", small=True)
    assert all(len(tensor) == 2 for tensor in batch.values())
    assert any(type(module).__name__ == BENCHES[name].layer for module in model.modules())
    assert BENCHES[name].sample(small=False) == BENCHES[name].changes.get("length", 1)


@pytest.mark.slow
def test_a_dry_run_of_one_model(tmp_path):
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--small"]
    words = ["--models", "gpt2", "--methods", "eager,ours", "--seconds", "900"]
    done = subprocess.run(
        [*script, *words, "--workers", "1", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + (tmp_path / "benchmark.log").read_text()
    found = json.loads((tmp_path / "benchmark.json").read_text())
    eager, ours = (row for row in found["rows"])
    assert [row["status"] for row in found["rows"]] == ["done"] * 2 and found["not_reached"] == []
    assert ours["batch"] == eager["batch"]
    assert ours["peak"] <= ours["limit"] < eager["peak"]
    assert ours["largest"] > eager["largest"]
    assert all(row["ratio"] > 0 and row["rate"] > 0 for row in found["rows"])

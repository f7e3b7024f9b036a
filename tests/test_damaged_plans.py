"""Plan files that are damaged, or made to do harm: a plan or a typed error, soon, and nothing else."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path

import pytest

from hybridremat.errors import OutputError, PlanFormatError
from hybridremat.planning.plan import Plan
from hybridremat.plans import codec, file_data
from hybridremat.plans.codec import checksum
from support.damaged_plans import KINDS, Corpus, ForbiddenError, corpus, nothing_else_happens, used

MADE = ("units", "sizes", "certified")
SECONDS = 10  # a busy machine; by itself each takes less than one


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("made"), MADE)


@pytest.mark.parametrize("first", [0, pytest.param(150, marks=pytest.mark.slow)])
def test_a_damaged_file_is_refused_or_shown(files, tmp_path, first):
    damaged, ends = Corpus.of(files), set()
    for seed in range(first, 150 if first == 0 else 1500):
        what, content = damaged.damaged(seed)
        (tmp_path / "plan.json").write_bytes(content)
        start = time.perf_counter()
        try:
            ends.add(used(tmp_path / "plan.json"))
        except Exception as error:
            error.add_note(f"seed {seed}: {what}")
            raise
        assert time.perf_counter() - start < SECONDS, (seed, what)
    assert {"refused", "shown"} <= ends


def test_files_of_every_kind_are_among_those_of_the_script():
    assert set(MADE) < set(KINDS)


def loaded(data, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data | {"checksum": checksum(data)}))
    return Plan.load(path)


def changed(data, change):
    data = copy.deepcopy(data)
    change(data)
    return data


OP = {name: number for number, name in enumerate(codec._columns()["Op"])}
VALUE = {name: number for number, name in enumerate(codec._columns()["Value"])}


def graph(data):
    return data["details"]["chain"]["graph"]


def set_op(name, item):
    return lambda data: graph(data)["ops"][1].__setitem__(OP[name], item)


def set_value(name, item):
    return lambda data: graph(data)["values"][-1].__setitem__(VALUE[name], item)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_op("module", "a\x1b[2J"), "no plan holds"),
        (set_op("source", "\ud800"), "no plan holds"),
        (set_op("name", "a\u202eb"), "no plan holds"),
        (set_op("flops", 2**63), "no plan holds"),
        (lambda data: data.update(overhead=float("nan")), "no plan holds nan"),
        (lambda data: data["timings"].update({"\x07": 1.0}), "no plan holds"),
        (set_op("time", -1), "negative"),
        (set_op("temp", -1), "negative"),
        (set_op("id", 0), "ops are not numbered by their places"),
        (set_value("id", 0), "values are not numbered by their places"),
        (set_op("reads", [-1]), "values that are not there"),
        (set_op("overwrites", [10**6]), "values that are not there"),
        (set_value("producer", 0), "not made by the ops that write them"),
        (lambda data: graph(data).update(gradients=[-1]), "values that are not there"),
        (lambda data: data["schedule"].update(steps=[-1]), "longer than its schedule|ops that are not there"),
        (lambda data: data["schedule"].update(num_forward=-1), "longer than its schedule"),
        (lambda data: graph(data).update(checkpointed=[10**6]), "ops that are not there"),
        (lambda data: data["blocks"].append(data["blocks"][0]), "blocks are not numbered"),
        (lambda data: data.update(strategy_gap=1e308), "saves more than its time"),
    ],
)
def test_what_no_plan_holds_is_refused_under_a_checksum_that_fits(files, tmp_path, change, said):
    assert loaded(files["certified"], tmp_path).certificate
    with pytest.raises(PlanFormatError, match=said):
        loaded(changed(files["certified"], change), tmp_path)


def test_decisions_in_an_order_that_cannot_be_carried_out_are_refused(files, tmp_path):
    def swapped(data):
        decisions = data["details"]["decisions"]
        decisions.reverse()

    with pytest.raises(PlanFormatError, match="the plan is damaged"):
        loaded(changed(files["certified"], swapped), tmp_path)


def test_a_file_that_is_nested_deeply_is_refused(files, tmp_path):
    deep = []
    for _ in range(file_data.DEEPEST):
        deep = [deep]
    with pytest.raises(PlanFormatError, match="nested in more than 64 levels"):
        loaded(files["certified"] | {"extra": deep}, tmp_path)


def test_parts_of_parts_end(files, tmp_path):
    data = files["units"]
    for _ in range(40):
        data = files["certified"] | {"parts": [data]}
    with pytest.raises(PlanFormatError):
        loaded(data, tmp_path)


@pytest.mark.parametrize("path", ["large.json", "/dev/zero"])
def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path, monkeypatch, path):
    monkeypatch.setattr(file_data, "MOST_BYTES", 1000)
    (tmp_path / "large.json").write_bytes(b"[" + b" " * 999 + b"]")
    with pytest.raises(PlanFormatError, match=r"it takes more than 1000 B, the most that is read"):
        Plan.load(tmp_path / path)


def test_a_plan_that_would_be_too_large_to_read_is_not_written(files, tmp_path, monkeypatch):
    plan = loaded(files["certified"], tmp_path)
    monkeypatch.setattr(codec, "MOST_BYTES", 1000)
    with pytest.raises(OutputError, match="no more than 1000 B are read"):
        plan.save(tmp_path / "again.json")
    assert not (tmp_path / "again.json").exists()


def test_what_is_watched_is_noticed(tmp_path):
    with pytest.raises(ForbiddenError), nothing_else_happens():
        (tmp_path / "written").write_text("")
    with pytest.raises(ForbiddenError), nothing_else_happens():
        (tmp_path / "written").unlink(missing_ok=True)
    assert Path(tmp_path).exists()


def test_gradients_that_leave_in_the_backward_have_to_be_computed(tmp_path):
    early = corpus(tmp_path, ("early",))["early"]
    leaving = graph(early)["deliveries"][0][0]
    makes = {tuple(op[OP["writes"]]): number for number, op in enumerate(graph(early)["ops"])}
    (maker,) = (number for writes, number in makes.items() if leaving in writes)
    kept = [step for step in early["schedule"]["steps"] if step != maker]
    assert len(kept) < len(early["schedule"]["steps"])
    with pytest.raises(PlanFormatError, match="gradients that leave"):
        loaded(changed(early, lambda data: data["schedule"].update(steps=kept)), tmp_path)

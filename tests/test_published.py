"""Published graphs and results, read from files in the forms of their authors."""

from __future__ import annotations

import json
import pickle
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import published
import published_logs
from published_files import Theirs, moccasin, monet
from published_logs import dtr

import hybridremat


@pytest.fixture
def like_monet(monkeypatch):
    """Objects of their classes, of which only the names are in files."""
    module = ModuleType("monet_solver")
    monkeypatch.setitem(sys.modules, "monet_solver", module)
    for name in ("SolverInfo", "FwdNode", "CheckmateSolution"):
        setattr(module, name, type(name, (), {"__module__": "monet_solver"}))

    def made(name, **attributes):
        found = getattr(module, name)()
        found.__dict__.update(attributes)
        return found

    return made


def write_monet(folder, like_monet, budget="0.01"):
    """Three ops forward, three backward; 4 MiB each; the loss is op 2."""
    nodes = {
        number: like_monet(
            "FwdNode", mem=np.int64(2**22), workspace_compute=[0.5 + number], fixed_mem=np.int64(2048)
        )
        for number in range(6)
    }
    edges = [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0), (4, 5, 0), (1, 3, 1), (0, 4, 1), (0, 4, 2)]
    graph = like_monet("SolverInfo", nodes=nodes, size=6, edge_list=edges, loss=2, model_name="net", bs=8)
    solution = like_monet("CheckmateSolution", runtime_expected=np.int64(1850), solve_time=12.5)
    (folder / f"checkmate_solution_net_8_normal_{budget}.pkl").write_bytes(pickle.dumps([graph, solution]))
    (folder / "checkmate_net_8").write_text(
        "Batch size  8\nModel net\nBest objective -, best bound -, gap -\n"
        "Best objective 1.850000000000e+03, best bound 1.845000000000e+03, gap 0.3%\n"
    )


def test_monets_files_are_read_without_their_code(tmp_path, like_monet, monkeypatch):
    write_monet(tmp_path, like_monet)
    monkeypatch.delitem(sys.modules, "monet_solver")
    (found,) = monet(tmp_path)
    assert found.name == "MONeT net (8), 0.01 GB"
    assert (list(found.ops), list(found.backward)) == ([0, 1, 2, 3, 4, 5], [3, 4, 5])
    assert found.edges == [(0, 1), (0, 4), (1, 2), (1, 3), (2, 3), (3, 4), (4, 5)]
    assert found.bytes == [4096] * 6
    assert found.times == [50, 150, 250, 350, 450, 550]
    assert found.budget == 10485 - 2
    assert found.theirs == Theirs("Checkmate", 1850 / 1800 - 1, 12.5, 1845 / 1800 - 1)


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path):
    class Harmful:
        def __reduce__(self):
            return print, ("run",)

    (tmp_path / "checkmate_solution_net_8_normal_1.00.pkl").write_bytes(pickle.dumps([Harmful(), Harmful()]))
    with pytest.raises(AttributeError, match="_Record"):
        list(monet(tmp_path))


def write_moccasin(folder):
    """A training step and a random layered graph, each of two branches that meet."""
    nodes = [
        {"id": number, "name": f"n{number}", "backward": number > 2, "cost_ram": 10, "cost_cpu": 2}
        for number in range(5)
    ]
    ends = [(0, 1), (1, 2), (2, 3), (1, 3), (3, 4), (0, 4)]
    links = [{"source": maker, "target": reader} for maker, reader in ends]
    step = {"graph": {"name": "net"}, "nodes": nodes, "links": links}
    (folder / "fcn_8_vgg (MLSys)_1_train_nx.json").write_text(json.dumps(step))
    layered = {
        "graph": {"order": [0, 2, 1]},
        "nodes": [{"name": number, "out_cost": 5, "duration": 3} for number in range(3)],
        "links": [{"0": 0, "1": 2}, {"0": 2, "1": 1}, {"0": 0, "1": 1}],
    }
    (folder / "random_layered_n3_w0.json").write_text(json.dumps(layered))
    (folder / "package.json").write_text("{}")


def test_moccasins_files_are_read(tmp_path):
    write_moccasin(tmp_path)
    found = {instance.name: instance for instance in moccasin(tmp_path)}
    assert list(found) == [
        *(f"Moccasin fcn_8_vgg, {share} %" for share in (90, 80, 70)),
        *(f"Moccasin random layered (3), {share} %" for share in (90, 80)),
    ]
    step, layered = found["Moccasin fcn_8_vgg, 80 %"], found["Moccasin random layered (3), 90 %"]
    assert (step.backward, step.budget, step.theirs) == ([3, 4], "80%", Theirs("Moccasin", 0.001))
    assert (layered.ops, layered.bytes, layered.theirs) == ([0, 2, 1], [5, 5, 5], None)
    assert layered.edges == [(0, 2), (2, 1), (0, 1)]


def logged(name, args, results, time):
    """A call: of each result its name, its bytes, and the argument that it is a view of, or -1."""
    names = [result for result, _, _ in results]
    yield {"INSTRUCTION": "CALL", "NAME": name, "ARGS": list(args), "TIME": str(time), "RESULT": names}
    for result, size, alias in results:
        yield {"INSTRUCTION": "MEMORY", "NAME": result, "MEMORY": str(size)}
        yield {"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": str(alias)}


def write_dtr(folder):
    """A norm with two outputs, a view, a call that changes what it reads, and their backward."""
    lines = [
        *logged("left_over", "", [("z", 9, -1)], 9),  # of the step before
        {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
        {"INSTRUCTION": "CONSTANT", "NAME": "w"},
        {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "7"},
        {"INSTRUCTION": "COPY", "DST": "v", "SRC": "w"},
        *logged("norm", "v", [("s", 2, -1), ("y", 40, -1)], 3),
        *logged("view", "y", [("t", 0, 0)], 0),
        {"INSTRUCTION": "RELEASE", "NAME": "y"},
        {"INSTRUCTION": "MUTATE", "NAME": "add_", "ARGS": ["t", "w"], "MUTATE": [0], "TIME": "5"},
        {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"},
        *logged("max_backward", "ts", [("g", 40, -1)], 4),
        *({"INSTRUCTION": "RELEASE", "NAME": name} for name in ("t", "s")),
    ]
    with zipfile.ZipFile(folder / "logs.zip", "w") as logs:
        logs.writestr("logs/tv_net-8-9.0-2020.log", "\n".join(map(json.dumps, lines)))
        logs.writestr("logs/other-8-9.0-2020.log", "")


def test_dtrs_logs_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(published_logs, "SIMULATED", {"net (8)": (100, {80: 2.5, 60: None})})
    write_dtr(tmp_path)
    found, small = dtr(tmp_path)
    assert (found.name, small.name) == ("DTR net (8), 80 %", "DTR net (8), 60 %")
    assert (found.theirs, small.theirs) == (Theirs("DTR", 0.025), Theirs("DTR", None))
    # norm, its further output, the view, add_, the backward, the end
    assert found.bytes == [40, 2, 0, 40, 40, 0]
    assert found.times == [3, 3, 0, 5, 4, 0]
    assert found.edges == [(0, 1), (0, 2), (0, 3), (2, 3), (1, 4), (3, 4), (4, 5)]
    assert (list(found.further), list(found.backward), found.budget) == ([1], [4, 5], 80 - 7)
    plan = hybridremat.DagPlan((0, 1, 2, 3, 4, 5), 0, 0, 0, 0, 0, 0)
    assert published.replayed(found, plan.steps) == 2 + 40 + 40 + 0
    assert published.checked(replace(found, budget=82), plan) == 0.0
    again = replace(plan, steps=(0, 1, 2, 3, 0, 1, 4, 5))
    assert published.checked(replace(found, budget=122), again) == 6 / 12


def test_a_log_that_says_something_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(published_logs, "SIMULATED", {"net (8)": (100, {80: 2.5})})
    lines = [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}, {"INSTRUCTION": "SWAP", "NAME": "x"}]
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as logs:
        logs.writestr("net-8-9.log", "\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match="SWAP"):
        list(dtr(tmp_path))


def test_rows_come_from_plans_that_are_replayed(tmp_path, like_monet, monkeypatch, capsys):
    write_monet(tmp_path, like_monet, "0.0118")
    write_moccasin(tmp_path)
    page, rows = tmp_path / "page.md", tmp_path / "rows.csv"
    page.write_text("<!-- written by benchmarks/published.py: begin -->\n<!-- end -->\n")
    monkeypatch.setattr(published, "PAGE", page)
    monkeypatch.setattr(published, "ROWS", rows)
    monkeypatch.setattr(sys, "argv", ["published.py", str(tmp_path), "net", "layered (3), 90"])
    published.main()
    said, text = capsys.readouterr().err, page.read_text()
    assert said.count("measured") == 2
    assert "Of 1 with a published result, ours is slower than 0." in text
    assert "| MONeT net (8), 0.0118 GB | 6 | Checkmate 2.778 | 2.500 | 12 s | 2.778 | 2.778 | " in text
    # its own order is the only one, and takes all three values at the end
    assert "| Moccasin random layered (3), 90 % | 3 | – | – | – | nothing found | – | " in text


def test_a_schedule_beyond_its_budget_is_no_row(tmp_path, like_monet):
    write_monet(tmp_path, like_monet, "0.0118")
    (found,) = monet(tmp_path)
    assert published.replayed(found, [0, 1, 2, 3, 4, 5]) == 4 * 4096
    assert published.replayed(found, [0, 1, 2, 3, 0, 4, 5]) == 3 * 4096
    plan = hybridremat.DagPlan((0, 1, 2, 3, 0, 4, 5), 0, 0, 0, 0, 0, 0)
    assert published.checked(found, plan) == 1850 / 1800 - 1
    for wrong in ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 0, 4)):
        with pytest.raises(RuntimeError, match="MONeT net"):
            published.checked(found, replace(plan, steps=wrong))


@pytest.mark.parametrize(
    ("method", "theirs", "ours", "slower"),
    [
        ("Checkmate", "0.060350", "0.060350", False),
        ("Checkmate", "0.060350", "0.060351", True),
        ("Moccasin", "0.001000", "0.001361", False),  # printed as 0.1 %
        ("Moccasin", "0.001000", "0.001500001", True),
        ("Checkmate", "0.060350", "", True),
    ],
)
def test_slower_is_said_as_far_as_theirs_was_printed(method, theirs, ours, slower):
    assert published.slower({"method": method, "theirs": theirs, "ours": ours}) is slower

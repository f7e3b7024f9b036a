"""The deliberate faults of tests/faults (`make faults`): each can be made, and its tests are there."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import faults
from faults import Fault

ROOT = Path(__file__).parents[1]
FAULTS = faults.known_faults()
ROOMS = "graph", "blocks", "sequence", "compiler", "planning", "runtime", "integrations", "plans", "analysis"


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.room}: {fault.name}")
def test_a_fault_can_be_made_and_its_tests_are_there(fault):
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    ast.parse(changed := fault.applied(source))
    assert changed != source
    assert fault.why.endswith(".")
    for path, name in (test.split("::") for test in fault.tests):
        assert name.partition("[")[0] in functions(ROOT / path)


def test_there_are_faults_of_every_room_and_none_is_there_twice():
    homes = {room: room if room in faults.BELOW else f"hybridremat/{room}" for room in ROOMS}
    assert {fault.room for fault in FAULTS} == {*ROOMS}
    assert all(fault.file.startswith(f"{homes[fault.room]}/") and fault.tests for fault in FAULTS)
    assert len({(fault.room, fault.name) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("old", ["is nowhere in the source", "import"])
def test_a_fault_whose_place_is_gone_or_not_one_is_refused(old):
    fault = Fault("graph", "moved", "graph/memory.py", old, "", (), "")
    with pytest.raises(ValueError, match="has its old text"):
        fault.applied((ROOT / fault.file).read_text(encoding="utf-8"))


def test_all_faults_have_their_turn(monkeypatch):
    seen = []
    for hour in range(7, 7 + faults.TURNS):
        monkeypatch.setattr(faults.subprocess, "check_output", lambda *_, hour=hour, **__: f"{3600 * hour}\n")
        seen += faults.of_turn(FAULTS)
    assert sorted(map(FAULTS.index, seen)) == [*range(len(FAULTS))]


@pytest.mark.slow
def test_only_what_fails_its_tests_is_caught(tmp_path):
    """In the copy, rooms beside hybridremat are the copy's own."""
    copy = faults.copied(tmp_path)
    test = "tests/test_blocks_simulate.py::test_save_everything"
    dies = next(fault for fault in FAULTS if fault.file == "blocks/simulate.py" and test in fault.tests)
    harmless = Fault("blocks", "none", dies.file, dies.old, f"{dies.old}  # as it is", (test,), "")
    missing = Fault("blocks", "none", dies.file, dies.old, dies.old + " ", (f"{test}_not",), "")
    found = [faults.outcome(copy, fault, number)[0] for number, fault in enumerate((harmless, dies, missing))]
    assert found == ["survived", "caught", "broken"]
    assert (copy / dies.file).read_bytes() == (ROOT / dies.file).read_bytes()

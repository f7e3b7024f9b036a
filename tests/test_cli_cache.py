"""``hybridremat cache`` and ``--no-cache``: what is kept, and that nothing else is ever deleted."""

import json
import subprocess
import sys

import pytest

from hybridremat.cli import main as cli
from hybridremat.planning import planner
from hybridremat.planning.option_cache import OptionCache
from support.command_line import QUICK

KEY = "0123456789abcdef" * 2


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    """A cache folder of its own, in which plans are kept."""
    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HYBRIDREMAT_CACHE_SIZE", "1MiB")
    monkeypatch.setattr(planner, "OPTIONS", OptionCache())  # what is known is not kept again
    return tmp_path / "cache"


def content(capsys, *words: str) -> dict:
    assert cli.main(["cache", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def files(folder) -> dict[str, int]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}


def make_a_plan(*words: str) -> None:
    assert cli.main(["plan", "mymodels.py:make", "--limit", "97%", *QUICK, *words]) == 0


def test_it_shows_what_a_plan_leaves_and_deletes_it(folder, capsys):
    assert content(capsys) == {
        "folder": str(folder),
        "plans": 0,
        "plan_bytes": 0,
        "options": 0,
        "option_bytes": 0,
        "kernel_files": 0,
        "kernel_bytes": 0,
        "cleared": False,
    }
    make_a_plan()
    capsys.readouterr()
    there = files(folder)
    plans = {name: size for name, size in there.items() if name.startswith("plans/")}
    shown = content(capsys)
    assert (shown["plans"], shown["plan_bytes"]) == (len(plans), sum(plans.values())) == (1, *plans.values())
    blocks = {name: size for name, size in there.items() if name.startswith("options/")}
    assert (shown["options"], shown["option_bytes"]) == (len(blocks), sum(blocks.values())) and blocks
    assert shown["kernel_files"] == len(there) - 1 - len(blocks) == 1
    assert shown["kernel_bytes"] == sum(there.values()) - shown["plan_bytes"] - shown["option_bytes"]
    assert content(capsys, "--clear") == {**shown, "cleared": True}
    assert files(folder) == {}
    assert content(capsys)["plans"] == 0


def test_as_text(folder, capsys):
    make_a_plan()
    capsys.readouterr()
    for words, done in (([], "kept"), (["--clear"], "deleted"), ([], "0 kept")):
        assert cli.main(["cache", *words]) == 0
        printed = capsys.readouterr().out
        assert str(folder) in printed
        assert done in printed


def test_only_our_files_are_counted_and_deleted(folder, capsys):
    ours = [f"plans/{KEY}.json.gz", f"plans/.{KEY}.json.gz.ab_c1.tmp", "kernels-0123456789abcdef.json"]
    ours += [f"options/{KEY}.json.gz"]
    others = ["plans/mine.json.gz", "plans/notes.txt", "kernels-mine.json", "readme", f"deeper/{KEY}.json.gz"]
    for name in ours + others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("12345")
    (folder / "plans" / f"{KEY[::-1]}.json.gz").mkdir()
    shown = content(capsys, "--clear")
    assert (shown["plans"], shown["plan_bytes"]) == (2, 10)
    assert (shown["kernel_files"], shown["kernel_bytes"]) == (1, 5)
    assert set(files(folder)) == set(others)


def test_no_cache_neither_keeps_nor_reads(folder, capsys):
    make_a_plan("--no-cache")
    assert not folder.exists()
    make_a_plan()
    before = files(folder)
    capsys.readouterr()
    make_a_plan()
    assert "read the kept plan" in capsys.readouterr().out
    make_a_plan("--no-cache")
    assert "read the kept plan" not in capsys.readouterr().out
    assert files(folder) == before


def test_a_plan_for_another_device_is_kept_apart(folder, capsys):
    make_a_plan()
    capsys.readouterr()
    for spec, kept in (("h200", False), ("t4", False), ("h200", True)):
        make_a_plan("--device-spec", spec)
        out = capsys.readouterr().out
        assert (f"{spec} (spec)" in out, "read the kept plan" in out) == (True, kept)


def test_a_spec_file_that_has_changed_makes_another_plan(folder, tmp_path, capsys):
    fields = {"name": "mine", "tf32": 1e12, "bf16": 1e12, "fp16": 1e12, "bandwidth": 1e11, "memory": 1 << 30}
    for rate, kept in ((1e12, False), (2e12, False), (1e12, True)):
        (tmp_path / "mine.json").write_text(json.dumps({**fields, "fp32": rate}))
        make_a_plan("--device-spec", "mine.json")
        assert ("read the kept plan" in capsys.readouterr().out) == kept


def test_it_loads_no_torch(folder):
    code = "import sys; from hybridremat.cli import main as cli; assert cli.main(['cache']) == 0\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

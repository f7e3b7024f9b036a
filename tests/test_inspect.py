"""``hybridremat inspect``: a plan, one block or one module of it, as text and as JSON."""

from __future__ import annotations

import json
import re

import pytest

import hybridremat
from hybridremat.cli import main as cli
from support.training import small
from support.wrapping import HOW, least_limit


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tight plan and its file."""
    model, batch = small("transformer")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit=least_limit(model, batch), **HOW)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return plan, str(path)


def printed(capsys, *arguments: str) -> str:
    assert cli.main(["inspect", *arguments]) == 0
    return capsys.readouterr().out


def test_the_whole_plan_is_what_print_shows(saved, capsys):
    plan, path = saved
    assert printed(capsys, path).rstrip("\n") == str(plan)
    assert json.loads(printed(capsys, path, "--json")) == plan.to_dict()


def test_all_shows_each_block_by_itself(saved, capsys):
    plan, path = saved
    merged, unfolded = printed(capsys, path), printed(capsys, path, "--all")
    first = [line.split()[0] for line in unfolded.splitlines() if re.match(r" ?\d+ ", line)]
    assert first == [str(block.index) for block in plan.blocks]
    assert len(unfolded) >= len(merged)


def test_one_block(saved, capsys):
    plan, path = saved
    assert printed(capsys, path, "--block", "1").rstrip("\n") == str(plan.inspect(1))
    data = json.loads(printed(capsys, path, "--block", "1", "--json"))
    assert data == json.loads(json.dumps(plan.inspect(1).to_dict()))
    everything = printed(capsys, path, "--block", "1", "--all")
    listed = everything[everything.index("Its options") :]
    assert sum(line.strip()[:1].isdigit() for line in listed.splitlines()) == plan.blocks[1].option_count
    assert cli.main(["inspect", path, "--block", "77"]) == 2
    assert "there is no block 77" in capsys.readouterr().err


def test_one_module(saved, capsys):
    plan, path = saved
    freed = (record.module for block in plan.blocks for record in block.freed)
    module = next(name for name in freed if "." in name)
    assert printed(capsys, path, "--explain", module).rstrip("\n") == str(plan.explain(module))
    data = json.loads(printed(capsys, path, "--explain", module, "--json"))
    assert data["module"] == module and len(data["values"]) == len(plan.explain(module).values)
    assert cli.main(["inspect", path, "--explain", "nowhere"]) == 2
    assert "no value of this plan is made in 'nowhere'" in capsys.readouterr().err

"""Settings together: each pair is refused by name, or plans, keeps its limit, and trains as plain PyTorch."""

from __future__ import annotations

import copy
import re
from dataclasses import fields
from pathlib import Path

import pytest

import hybridremat
from hybridremat.errors import InfeasibleLimitError, LimitError
from hybridremat.planning.settings import REFUSED_PAIRS, Settings
from hybridremat.sequence.offload.link import Link
from support.setting_pairs import ALONE, PAIRS, REFUSED, asked, made, table
from support.training import train

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
HOW = {"cost_model": "flops", "workers": 1, "progress": False}
SEVERAL = {'graph_breaks="plan"', "units"}
OTHER_BITS = {'compiler="inductor"', 'rewrites="chunked"'}
ALLOWED = [pair for pair in PAIRS if {*pair} not in REFUSED]


@pytest.fixture(autouse=True)
def link(monkeypatch):
    """So fast that whatever may move does."""
    monkeypatch.setattr("hybridremat.planning.moving.NOMINAL", Link(1e15, 1e15, latency=0))


def test_the_documentation_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8")


def test_every_pair_that_is_refused_is_among_the_pairs():
    assert {frozenset(pair) for pair in PAIRS} >= REFUSED and len(REFUSED) == len(REFUSED_PAIRS)
    for pair in ALLOWED:
        Settings(**asked(*pair)).validated(need_limit=True)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if {*pair} in REFUSED], ids=" and ".join)
def test_a_pair_that_is_refused_says_which_and_what_to_do(pair):
    model, batch = made(pair)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LimitError) as raised:
        hybridremat.plan(model, kwargs=batch, **asked(*pair), **HOW)
    text = str(raised.value)
    assert all(name.split("=")[0] in text for name in pair)
    assert re.search("leave|remove|plan ", text.lower())
    assert all((value == before[name]).all() for name, value in model.state_dict().items())


def feasible(call, model, batch, given):
    """What a call gives with these settings, or with the least limit where theirs is not feasible."""
    try:
        return call(model, kwargs=batch, **given, **HOW)
    except InfeasibleLimitError as error:
        return call(model, kwargs=batch, **given | {"memory_limit": error.least}, **HOW)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [p for p in ALLOWED if "device_spec" in p], ids=" and ".join)
def test_a_pair_plans_for_another_device(pair):
    model, batch = made(pair)
    plan = feasible(hybridremat.plan, model, batch, asked(*pair))
    assert plan.memory_limit is None or plan.needed <= plan.memory_limit


@pytest.mark.slow
@pytest.mark.parametrize("pair", [p for p in ALLOWED if "fsdp" in p], ids=" and ".join)
def test_a_pair_plans_units_to_be_sharded(pair):
    model, batch = made(pair)
    plan = feasible(hybridremat.plan, model, batch, asked(*pair))
    assert plan.memory_limit is None or plan.needed <= plan.memory_limit
    assert any(each.beside_backward for each in plan.composition.sections)


def trained_pairs():
    """Checkmate solves for half a minute, and Inductor compiles as long: left to the slow tests."""
    for pair in ALLOWED:
        if not {"device_spec", "fsdp"} & {*pair}:
            takes_long = {'strategy="checkmate"', 'compiler="inductor"'} & {*pair}
            yield pytest.param(pair, marks=pytest.mark.slow) if takes_long else pair


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("pair", trained_pairs(), ids=" and ".join)
def test_a_pair_that_is_allowed_keeps_its_limit_and_the_numbers(pair):
    model, batch = made(pair)
    plain = copy.deepcopy(model)
    feasible(hybridremat.wrap, model, batch, asked(*pair))
    plan = hybridremat.get_plan(model)
    assert plan.memory_limit is None or plan.needed <= plan.memory_limit
    assert any(each.schedule.moves for each in (plan, *plan.parts)) == ("offload" in pair)
    # two units and what Dynamo captures around them, which is two graphs where it breaks besides
    graphs = {0: 0, 1: 3 if "units" in pair else 2, 2: 4}
    assert len(plan.parts) == graphs[len(SEVERAL & {*pair})]
    measured = hybridremat.measure(model, kwargs=batch)
    # of what the caller drops before the backward a plan with all outputs counts more
    assert measured.peak <= plan.needed
    if not OTHER_BITS.intersection(pair):
        assert train(plain, batch).differences(train(model, batch)) == []


def test_every_setting_is_among_the_pairs():
    told = {key for given in ALONE.values() for key in given} | {"memory_limit"}
    beside = {"cost_model", "workers", "cache", "max_plans", "block_solver", "untried"}
    beside |= {"host_memory_limit"}
    assert told | beside | {"reckoning", "granted", "own_units"} == {each.name for each in fields(Settings)}

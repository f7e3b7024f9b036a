"""Plan files of many sizes: what they hold, and that their schedules run at all sizes that they cover."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.errors import InputError, PlanFormatError, PlanMismatchError
from hybridremat.graph.sizes import Domain, Term
from hybridremat.planning import planner
from hybridremat.plans.codec import checksum, plan_from_dict, plan_to_dict
from hybridremat.plans.coverage import Coverage
from hybridremat.plans.origin import Origin, TensorSpec
from hybridremat.reports.html_page import render_html
from support.sized_steps import HOW, captured, portfolio, require_exact, rows, tokens, wrapped
from support.training import Mlp, Transformer


def small():
    return Transformer(1, 16)


@pytest.fixture(scope="module")
def trained():
    """A plain model, and one wrapped like it that has run at five sizes; two schedules at least."""
    return wrapped(small, tokens, "75%", (4, 40), (3, 33), (2, 24), (4, 39), (4, 17))


@pytest.fixture(scope="module")
def file(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    hybridremat.get_plan(trained[1]).save(path)
    return path


@pytest.fixture
def searches(monkeypatch):
    """Counts the graphs that are searched."""
    made, plan_graph = [], planner.plan_graph

    def counted(*args, **kwargs):
        made.append(args)
        return plan_graph(*args, **kwargs)

    monkeypatch.setattr(planner, "plan_graph", counted)
    return made


def test_a_file_has_sizes_ranges_figures_and_schedules(trained, file):
    plan, read = hybridremat.get_plan(trained[1]), hybridremat.Plan.load(file)
    known = read.coverage
    assert read == plan and read.sizes == plan.sizes == {"batch": 4, "length": 17}
    assert known.places == {"batch": ((0, 0),), "length": ((0, 1),)}
    assert known.domain.ranges["batch"][0] == known.domain.ranges["length"][0] == 2
    assert {(row.sizes["batch"], row.sizes["length"]) for row in known.rows} == {
        (4, 40), (3, 33), (2, 24), (4, 39), (4, 17),
    }  # fmt: skip
    assert set(map(str, plan.others.known())) < set(map(str, known.rows))
    emitted = {member.schedule for member in portfolio(trained[1]).members}
    assert len(emitted) > 1 and emitted <= {each.schedule for each in known.schedules}
    assert f"{len(known.schedules)} schedules, 5 sizes planned" in str(read)
    assert "Other sizes" in render_html(read)


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow), False])
def test_it_is_applied_at_sizes_that_it_covers_and_nothing_is_searched(trained, file, searches, dynamic):
    plain = copy.deepcopy(trained[0])
    model, limit = copy.deepcopy(plain), hybridremat.Plan.load(file).memory_limit
    hybridremat.wrap(model, kwargs=tokens(3, 29), plan=file, dynamic=dynamic, **HOW)
    for sizes in ((3, 29), (4, 40), (2, 37), (4, 17)):
        plan = require_exact(model, plain, tokens(*sizes), steps=2)
        assert plan.memory_limit == limit
        expected = hybridremat.prepare(trained[1], kwargs=tokens(*sizes))
        assert plan.overhead <= expected.overhead + 0.005
    assert not searches
    assert dynamic is False or captured(model)[0] == 1
    assert hybridremat.get_plan(model).sizes == {"batch": 4, "length": 17}


def test_what_it_does_not_cover_is_another_step(trained, file, searches, caplog):
    plain = copy.deepcopy(trained[0])
    for other in (Transformer(1, 32), nn.Sequential(small())):
        with pytest.raises(PlanMismatchError, match="not made for this step"):
            hybridremat.wrap(other, args=(tokens(3, 29)["tokens"],), plan=file, **HOW)
    with pytest.raises(PlanMismatchError, match="it is for inputs"):
        hybridremat.wrap(copy.deepcopy(plain), kwargs=tokens(1, 29), plan=file, **HOW)
    model = copy.deepcopy(plain)
    hybridremat.wrap(model, kwargs=tokens(4, 40), plan=file, dynamic=False, **HOW)
    assert not searches
    require_exact(model, plain, tokens(1, 29))  # another graph
    assert searches


def test_where_none_of_its_schedules_fits_one_is_searched_for(trained, file, searches, caplog):
    plain, read = copy.deepcopy(trained[0]), hybridremat.Plan.load(file)
    model, given = copy.deepcopy(plain), replace(read, coverage=replace(read.coverage, schedules=()))
    with caplog.at_level(logging.INFO, logger="hybridremat"):
        hybridremat.wrap(model, kwargs=tokens(2, 9), plan=given, **HOW)
        assert not searches
        plan = require_exact(model, plain, tokens(4, 40))
        hybridremat.wrap(copy.deepcopy(plain), kwargs=tokens(4, 40), plan=given, **HOW)
    assert searches and plan.overhead > 0 and plan.memory_limit == read.memory_limit
    assert captured(model)[0] == 1
    assert caplog.text.count("no schedule of the given plan runs at") == 2


def test_a_share_in_a_file_stays_the_bytes_that_it_was(tmp_path):
    torch.manual_seed(0)
    model = hybridremat.wrap(Mlp(32, 3), kwargs=rows(64), memory_limit="70%", dynamic=True, **HOW)
    plan = hybridremat.get_plan(model)
    plan.save(tmp_path / "plan.json")
    other = hybridremat.wrap(Mlp(32, 3), kwargs=rows(20), plan=tmp_path / "plan.json", **HOW)
    assert hybridremat.get_plan(other).memory_limit == plan.memory_limit


def test_a_plan_of_a_file_says_where_other_sizes_come_from(file):
    read = hybridremat.Plan.load(file)
    with pytest.raises(InputError, match="from a file"):
        read.at(length=20)
    with pytest.raises(InputError, match="from a file"):
        read.curve(length=[20])


@pytest.mark.parametrize(
    "change",
    [
        lambda known: known["own"].update(length=18),
        lambda known: known["own"].pop("length"),
        lambda known: known["places"].update(batch=[[7, 0]]),
        lambda known: known["domain"]["ranges"].pop("batch"),
        lambda known: known["domain"].update(guards=[["**", "batch", 2]]),
        lambda known: known["schedules"][0]["schedule"]["steps"].pop(0),
        lambda known: known["schedules"][0]["schedule"]["steps"].append(10**6),
    ],
)
def test_a_damaged_file_is_refused(file, change):
    data = json.loads(file.read_text())
    change(data["coverage"])
    with pytest.raises(PlanFormatError, match="damaged"):
        plan_from_dict(data | {"checksum": checksum(data)}, hybridremat.Plan)


def test_conditions_of_a_capture_are_written_and_read(file):
    plan = hybridremat.Plan.load(file)
    guards = (Term("<", (Term("*", ("batch", "length")), 500)), Term("not", (Term("==", ("batch", 7)),)))
    domain = replace(plan.coverage.domain, guards=guards)
    given = replace(plan, coverage=replace(plan.coverage, domain=domain))
    known = plan_from_dict(plan_to_dict(given), hybridremat.Plan).coverage
    assert known.domain == domain
    inputs = [replace(plan.origin.inputs[0], shape=shape) for shape in ((6, 50), (10, 50), (7, 50))]
    found = [known.sizes_of(plan.origin, (each, *plan.origin.inputs[1:])) for each in inputs]
    assert found == [{"batch": 6, "length": 50}, None, None]


def test_sizes_of_inputs_are_those_of_all_their_dimensions():
    planned = Origin(inputs=(TensorSpec("x", (4, 9, 16), "float32"), TensorSpec("y", (4, 9), "int64")))
    places = {"batch": ((0, 0), (1, 0)), "length": ((0, 1), (1, 1))}
    domain = Domain({"batch": (2, None), "length": (2, 99)})
    known = Coverage({"batch": 4, "length": 9}, places, domain, (), ())

    def sizes(*shapes, names=("x", "y"), dtypes=("float32", "int64")):
        return known.sizes_of(planned, tuple(map(TensorSpec, names, shapes, dtypes)))

    assert sizes((5, 7, 16), (5, 7)) == {"batch": 5, "length": 7}
    assert known.ranges == {"batch": "from 2", "length": "2 to 99"}
    for shapes in (((5, 7, 16), (5, 8)), ((5, 7, 15), (5, 7)), ((5, 7, 16), (5,)), ((5, 100, 16), (5, 100))):
        assert sizes(*shapes) is None
    assert sizes((5,), (5, 7)) is None and sizes((5, 7, 16), (5, 7), names=("x", "z")) is None
    assert sizes((5, 7, 16), (5, 7), dtypes=("float64", "int64")) is None
    assert known.sizes_of(planned, planned.inputs[:1]) is None

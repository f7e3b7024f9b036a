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
from hybridremat.graph.joint import Schedule
from hybridremat.graph.sizes import Domain, Term
from hybridremat.planning import planner
from hybridremat.planning.covered_plan import frontier_of_file
from hybridremat.plans.codec import checksum, plan_from_dict, plan_to_dict
from hybridremat.plans.coverage import Coverage, KnownSchedule
from hybridremat.plans.origin import Origin, TensorSpec
from hybridremat.reports.html_page import render_html
from hybridremat.sequence.effort import PlanningEffort
from support.sized_steps import HOW, captured, portfolio, require_exact, rows, tokens, wrapped
from support.training import Mlp, Transformer, train


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
    with pytest.raises(PlanMismatchError, match="batch = 1 is outside 2"):
        hybridremat.wrap(copy.deepcopy(plain), kwargs=tokens(1, 29), plan=file, **HOW)
    model = copy.deepcopy(plain)
    hybridremat.wrap(model, kwargs=tokens(4, 40), plan=file, dynamic=False, **HOW)
    assert not searches
    require_exact(model, plain, tokens(1, 29))  # another graph
    assert searches


class Sine(Mlp):
    """Another graph on the same parameters."""

    def forward(self, x):
        return super().forward(torch.sin(x))


Sine.__name__ = Sine.__qualname__ = "Mlp"


def frozen():
    model = Mlp(32, 3)
    model.layers[0].requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def multilayer(tmp_path_factory):
    """The file of a small net at three sizes."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    model = hybridremat.wrap(Mlp(32, 3), kwargs=rows(64), memory_limit="80%", **HOW)
    for batch in (48, 20):
        hybridremat.prepare(model, kwargs=rows(batch))
    hybridremat.get_plan(model).save(path)
    return path


OTHERS = {"sine": lambda: Sine(32, 3), "frozen": frozen, "double": lambda: Mlp(32, 3).double()}


@pytest.mark.parametrize("make", [*OTHERS.values()], ids=[*OTHERS])
@pytest.mark.parametrize(("batch", "dynamic"), [(20, None), (30, None), (30, False), (30, True)])
def test_another_model_is_refused_at_every_size(multilayer, make, batch, dynamic, searches):
    model = make()
    dtype = next(model.parameters()).dtype
    inputs = {"x": rows(batch)["x"].to(dtype)}
    with pytest.raises(PlanMismatchError, match="not made for this step"):
        hybridremat.wrap(model, kwargs=inputs, plan=multilayer, dynamic=dynamic, **HOW)
    assert not searches and model._compiled_call_impl is None


@pytest.mark.parametrize("dynamic", [None, False])
def test_what_changes_later_is_planned_without_it(multilayer, dynamic, searches, tmp_path):
    torch.manual_seed(0)
    model = hybridremat.wrap(Mlp(32, 3), kwargs=rows(30), plan=multilayer, dynamic=dynamic, **HOW)
    plain = copy.deepcopy(model)
    require_exact(model, plain, rows(40))
    assert not searches
    for each in (model, plain):
        each.layers[0].requires_grad_(False)
    for batch in (25, 35, 45):
        require_exact(model, plain, rows(batch))
    assert searches
    hybridremat.get_plan(model).save(tmp_path / "plan.json")
    read = hybridremat.Plan.load(tmp_path / "plan.json")
    assert read.schedule == hybridremat.get_plan(model).schedule
    known = () if read.coverage is None else read.coverage.rows
    assert {row.sizes["batch"] for row in known} <= {25, 35, 45}  # the others are of the other graph


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_saved_again_it_has_the_sizes_that_were_planned_since(multilayer, dynamic, tmp_path):
    before = {row.sizes["batch"] for row in hybridremat.Plan.load(multilayer).coverage.rows}
    assert before == {64, 48, 20}
    model = hybridremat.wrap(Mlp(32, 3), kwargs=rows(30), plan=multilayer, dynamic=dynamic, **HOW)
    hybridremat.prepare(model, kwargs=rows(40))
    hybridremat.get_plan(model).save(tmp_path / "again.json")
    read = hybridremat.Plan.load(tmp_path / "again.json")
    assert {row.sizes["batch"] for row in read.coverage.rows} == {*before, 30, 40}
    assert [row.sizes["batch"] for row in read.coverage.rows] == [20, 30, 40, 48, 64]
    assert len(read.coverage.schedules) >= len(hybridremat.Plan.load(multilayer).coverage.schedules) > 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_outside_of_it_are_named(multilayer, dynamic):
    says = r"its schedules are for other sizes: batch = 1 is outside 2 to any size"
    with pytest.raises(PlanMismatchError, match=says):
        hybridremat.wrap(Mlp(32, 3), kwargs=rows(1), plan=multilayer, dynamic=dynamic, **HOW)
    with pytest.raises(PlanMismatchError) as error:
        hybridremat.wrap(Mlp(32, 4), kwargs=rows(30), plan=multilayer, dynamic=dynamic, **HOW)
    assert "parameters" in str(error.value) and "inputs (" not in str(error.value)


@pytest.mark.filterwarnings("ignore::hybridremat.errors.KeptGradientWarning")
@pytest.mark.parametrize("first", [None, True])
def test_gradients_that_leave_do_so_by_a_file_too(first, searches, tmp_path):
    """A capture with symbols has sizes among its inputs, by whose numbers gradients leave."""
    torch.manual_seed(0)
    model, path = Mlp(32, 3), tmp_path / "plan.json"
    plain = copy.deepcopy(model)
    asked = {"memory_limit": "90%", "gradients": "in_backward", "dynamic": first}
    hybridremat.wrap(model, kwargs=rows(64), **asked, **HOW)
    for batch in (48, 20):
        hybridremat.prepare(model, kwargs=rows(batch))
    hybridremat.get_plan(model).save(path)
    known = hybridremat.Plan.load(path)
    assert {row.sizes["batch"] for row in known.coverage.rows} == {64, 48, 20}
    searches.clear()
    for batch, dynamic in ((20, None), (20, True), (30, None), (30, True), (30, False), (64, None)):
        other = copy.deepcopy(plain)
        hybridremat.wrap(other, kwargs=rows(batch), plan=path, dynamic=dynamic, **HOW)
        its = copy.deepcopy(plain)
        mine, theirs = (train(each, rows(batch), steps=2, measure=False) for each in (other, its))
        assert theirs.differences(mine) == []
        assert hybridremat.get_plan(other).memory_limit == known.memory_limit
    assert not searches


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


def test_no_search_is_worth_its_time_beside_a_plan_of_the_caller(multilayer, searches, monkeypatch):
    monkeypatch.setattr(PlanningEffort, "seconds", lambda *_: 1e9)
    model = hybridremat.wrap(Mlp(32, 3), kwargs=rows(30), plan=multilayer, **HOW)
    hybridremat.prepare(model, kwargs=rows(60))
    assert not searches
    alone = hybridremat.wrap(Mlp(32, 3), kwargs=rows(64), memory_limit="80%", **HOW)
    searches.clear()
    for batch in (30, 60):
        hybridremat.prepare(alone, kwargs=rows(batch))
    assert len(searches) > 1


def test_what_is_beaten_at_its_own_sizes_may_be_the_best_elsewhere(multilayer):
    read = hybridremat.Plan.load(multilayer)
    found = frontier_of_file(read)
    assert {each.schedule for each in found.candidates} == {
        read.schedule, *(each.schedule for each in read.coverage.schedules)
    }  # fmt: skip
    needs = [each.needs for each in found.candidates]
    assert needs == sorted(needs) and found.least_composed.needs == needs[0]
    slow = replace(read.coverage, schedules=(*read.coverage.schedules, KnownSchedule(repeated(read))))
    assert len(frontier_of_file(replace(read, coverage=slow)).candidates) == len(found.candidates) + 1


@pytest.mark.parametrize("how", [{"strategy": "rotor"}, {"policy": {"*:gelu": "must_recompute"}}], ids=str)
def test_a_plan_whose_sizes_are_searched_one_by_one_covers_its_own_alone(how):
    plan = hybridremat.plan(Mlp(32, 3), kwargs=rows(64), memory_limit="95%", dynamic=True, **how, **HOW)
    assert plan.sizes == {"batch": 64} and plan.covering().coverage is None
    assert plan.at(batch=48).needed <= plan.at(batch=48).memory_limit


def repeated(plan):
    """The schedule of a plan with its first op run twice."""
    steps = plan.schedule.steps
    return Schedule((steps[0], *steps), plan.schedule.num_forward + 1)


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

"""Plans at sizes by name, without inputs of these sizes: ``plan.at``, ``plan.curve``, ``prepare(sizes=)``."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

import hybridremat
from hybridremat.cli.main import main
from hybridremat.errors import InfeasibleLimitError, InputError, LimitError, PlotError
from hybridremat.plans.origin import TensorSpec
from hybridremat.plans.sizes import SizeRow, curves, dimension_names, equal_dimensions, varying
from hybridremat.reports import size_plot
from hybridremat.reports.html_page import render_html
from hybridremat.reports.size_curve import SizeCurve
from support.sized_steps import HOW, Embedded, captured, tokens
from support.training import ConvNet, Mlp, train


def embedded():
    torch.manual_seed(0)
    return Embedded()


@pytest.fixture(scope="module")
def plan():
    return hybridremat.plan(embedded(), kwargs=tokens(2, 24), memory_limit=90_000, dynamic=True, **HOW)


@pytest.fixture
def wrapped():
    return hybridremat.wrap(embedded(), kwargs=tokens(2, 24), memory_limit=150_000, dynamic=None, **HOW)


def test_a_plan_that_was_dropped_is_made_again():
    model = hybridremat.wrap(
        embedded(), kwargs=tokens(2, 16), memory_limit=150_000, dynamic=True, max_plans=2, **HOW
    )
    plan = hybridremat.get_plan(model)
    first = plan.at(length=24)
    for length in (32, 40, 48):
        plan.at(length=length)
    again = plan.at(length=24)
    assert again.details is not None
    assert again.blocks == first.blocks
    assert (again.schedule, again.predicted_peak) == (first.schedule, first.predicted_peak)


def test_a_plan_at_other_sizes_is_what_the_step_needs_there(wrapped):
    plain = copy.deepcopy(embedded())
    hybridremat.prepare(wrapped, kwargs=tokens(3, 30))
    plan = hybridremat.get_plan(wrapped)
    assert plan.sizes == {"batch": 3, "length": 30}
    other = plan.at(length=41)
    assert other.sizes == {"batch": 3, "length": 41}
    assert other.origin.inputs[0].shape == (3, 41)
    assert hybridremat.get_plan(wrapped).fingerprint == plan.fingerprint  # the model's current plan stays
    batch = tokens(3, 41)
    mine, theirs = train(wrapped, batch, steps=2), train(plain, batch, steps=2)
    assert theirs.differences(mine) == []
    assert max(mine.peaks) == other.predicted_peak  # the first step was planned
    assert hybridremat.get_plan(wrapped).fingerprint == other.fingerprint


def test_a_curve_has_all_pairs_of_sizes_each_as_its_plan_says(plan):
    curve = plan.curve(batch=[2, 3], length=[16, 24])
    found = [tuple(row.sizes.values()) for row in curve.rows]
    assert found == [(2, 16), (2, 24), (3, 16), (3, 24)]
    for row in curve.rows:
        there = plan.at(**row.sizes)
        assert (row.plain_peak, row.needed, row.overhead) == (there.plain_peak, there.needed, there.overhead)
        assert row.needed <= row.memory_limit == 90_000
    assert "batch" in str(curve)
    assert json.loads(json.dumps(curve.to_dict()))["rows"][1]["sizes"] == {"batch": 2, "length": 24}


def test_a_size_at_which_nothing_fits_is_in_the_curve_and_an_error_of_its_own(plan):
    small, large = plan.curve(length=[8, 200]).rows
    assert small.needed is not None
    assert (large.needed, large.plain_peak, large.overhead) == (None, None, None)
    assert large.least > 90_000
    assert "does not fit" in str(SizeCurve((large,)))
    with pytest.raises(InfeasibleLimitError):
        plan.at(length=200)


def test_looking_at_a_size_does_not_raise_a_share_for_others():
    plan = hybridremat.plan(embedded(), kwargs=tokens(2, 24), memory_limit="90%", dynamic=True, **HOW)
    rows = plan.curve(length=[8, 40, 24]).rows
    assert [row.sizes["length"] for row in rows] == [8, 40, 24]
    assert rows[1].memory_limit == 9 * rows[1].plain_peak // 10 > plan.memory_limit
    assert rows[0].memory_limit == rows[2].memory_limit == plan.memory_limit
    assert plan.at(length=30).memory_limit == 9 * plan.at(length=30).plain_peak // 10 < rows[1].memory_limit


def test_preparing_sizes_makes_a_share_that_of_the_largest():
    model = hybridremat.wrap(embedded(), kwargs=tokens(2, 24), memory_limit="90%", **HOW)
    rows = hybridremat.prepare(model, kwargs=tokens(2, 24), sizes=[{"length": n} for n in (30, 40)]).rows
    assert rows[0].memory_limit == rows[1].memory_limit == 9 * rows[1].plain_peak // 10


@pytest.mark.parametrize(
    ("sizes", "says"),
    [({"width": 3}, "batch, length"), ({"length": 0}, "≥ 1"), ({"batch": 2.0}, "≥ 1"), ({"batch": 1}, "own")],
)
def test_sizes_that_cannot_be_planned_are_refused(plan, sizes, says):
    with pytest.raises(InputError, match=says):
        plan.at(**sizes)


@pytest.mark.parametrize("sizes", [{"length": 8}, {"length": "24"}, {"length": ["8"]}, {"batch": [2, 0]}])
def test_curves_of_what_is_no_list_of_sizes_are_refused(plan, sizes):
    with pytest.raises(InputError, match=r"is no (list|size)"):
        plan.curve(**sizes)


def test_a_plan_of_one_shape_says_how_to_have_all():
    plan = hybridremat.plan(Mlp(32, 1), kwargs={"x": torch.randn(4, 32)}, memory_limit="100%", **HOW)
    assert plan.sizes == {}
    with pytest.raises(InputError, match="dynamic=True"):
        plan.at(batch=3)


def test_copies_of_a_plan_are_of_its_own_sizes(plan):
    sent = pickle.loads(pickle.dumps(plan))  # noqa: S301 (its own)
    for other in (sent, copy.deepcopy(plan)):
        assert other == plan
        assert other.sizes == {}


def test_prepare_captures_once_for_the_sizes_that_are_named(wrapped):
    curve = hybridremat.prepare(wrapped, kwargs=tokens(2, 24), sizes=[{"length": 30}, {"length": 17}])
    assert [row.sizes for row in curve.rows] == [{"length": 30}, {"length": 17}]
    assert captured(wrapped)[0] == 1
    for length in (17, 30):
        batch = tokens(2, length)
        peaks = train(wrapped, batch, steps=1).peaks
        assert peaks == [hybridremat.get_plan(wrapped).predicted_peak]
    assert captured(wrapped)[0] == 1


def test_prepare_plans_what_fits_and_names_what_does_not(wrapped):
    with pytest.raises(InfeasibleLimitError, match=r"1 of 3 sizes.*length=400") as raised:
        hybridremat.prepare(wrapped, kwargs=tokens(2, 24), sizes=[{"length": n} for n in (400, 20, 30)])
    assert raised.value.least > raised.value.limit == 150_000
    assert [row.sizes["length"] for row in hybridremat.get_plan(wrapped).others.known()] == [20, 24, 30]


def test_prepare_refuses_sizes_that_no_input_has(wrapped):
    with pytest.raises(InputError, match="batch, length"):
        hybridremat.prepare(wrapped, kwargs=tokens(2, 24), sizes=[{"height": 30}])


@pytest.mark.parametrize("sizes", [[], [{}], {"length": 30}, "length", [("length", 3)], [{"length": "a"}]])
def test_prepare_refuses_what_names_no_sizes(wrapped, sizes):
    with pytest.raises(InputError, match=r"no sizes?"):
        hybridremat.prepare(wrapped, kwargs=tokens(2, 24), sizes=sizes)


def test_prepare_refuses_sizes_where_each_shape_is_captured_by_itself():
    batch = {"x": torch.randn(4, 32)}
    model = hybridremat.wrap(Mlp(32, 1), kwargs=batch, memory_limit="100%", dynamic=False, **HOW)
    with pytest.raises(LimitError, match="dynamic=False"):
        hybridremat.prepare(model, kwargs=batch, sizes=[{"batch": 3}])


def test_images_have_height_and_width():
    images = {"x": torch.randn(4, 3, 12, 16), "labels": torch.randint(0, 5, (4,))}
    plan = hybridremat.plan(ConvNet(), kwargs=images, memory_limit="100%", dynamic=True, **HOW)
    assert set(plan.sizes) <= {"batch", "height", "width"}
    assert "batch" in plan.sizes


def test_names_are_by_place_and_those_of_one_name_by_input():
    shapes = {"mask": (4, 1, 9, 9), "ids": (4, 9), "to": (4, 7)}
    inputs = [TensorSpec(name, shape, "int64") for name, shape in shapes.items()]
    named = dimension_names(equal_dimensions(inputs), inputs)
    assert named == {
        "batch": ((0, 0), (1, 0), (2, 0)),
        "length": ((0, 2), (0, 3), (1, 1)),
        "to.1": ((2, 1),),
    }


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_dimension_above_one_has_one_name(shapes):
    inputs = [TensorSpec(f"x{number}", tuple(shape), "float32") for number, shape in enumerate(shapes)]
    named = dimension_names(equal_dimensions(inputs), inputs)
    places = [place for each in named.values() for place in each]
    every = [(n, dim) for n, shape in enumerate(shapes) for dim, size in enumerate(shape) if size > 1]
    assert sorted(places) == every
    assert all(len({shapes[n][dim] for n, dim in each}) == 1 for each in named.values())


def row(needed=90, **sizes):
    return SizeRow(sizes, 100, 120 << 20 if needed else None, needed, 0.1 if needed else None)


def test_curves_are_by_the_size_that_varies_most():
    rows = [row(batch=b, length=n) for b in (1, 2) for n in (30, 10, 20)] + [row(None, batch=3, length=10)]
    assert varying(rows[:1]) is None
    over = varying(rows)
    assert over in ("batch", "length")
    found = curves(rows, "length")
    assert [[each.sizes["length"] for each in curve] for curve in found] == [[10, 20, 30]] * 2


def test_a_curve_is_drawn_where_something_fits(tmp_path, monkeypatch):
    figure = Figure()
    monkeypatch.setattr(size_plot, "new_figure", lambda: figure)
    rows = (*(row(90 << 20, length=n) for n in (10, 20)), row(None, length=30))
    SizeCurve(rows).plot(tmp_path / "curve.svg")
    memory, _ = figure.axes
    (planned,) = (line for line in memory.get_lines() if line.get_label() == "planned")
    assert list(planned.get_ydata()[:2]) == [90, 90] and np.isnan(planned.get_ydata()[2:]).all()
    assert "MiB" in memory.get_ylabel()
    with pytest.raises(PlotError, match="no size varies"):
        SizeCurve((row(length=3),)).plot(tmp_path / "one.svg")
    assert not (tmp_path / "one.svg").exists()


def test_the_report_has_all_sizes_that_were_planned(plan):
    plan.at(length=20)
    page = render_html(plan)
    assert "Other sizes" in page
    assert page.count("<polyline") >= 3
    assert '<td class="number">20</td>' in page


NET = """from support.sized_steps import Embedded, tokens

def make():
    return Embedded(), tokens(2, 48)
"""


def test_the_command_plans_at_sizes(capsys, tmp_path):
    (tmp_path / "sized_net.py").write_text(NET)
    given = ["plan", f"{tmp_path / 'sized_net.py'}:make", "--limit", "90%", "-q"]
    given += ["--cost-model", "flops", "--sizes", "length=32:64:32", "--curve", str(tmp_path / "curve.png")]
    assert main([*given, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["curve"]["rows"]
    assert [each["sizes"]["length"] for each in rows] == [32, 64]
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "wrong",
    [["--sizes", "length=a"], ["--sizes", "length=1:2:0"], ["--curve", "x.png"], ["--dynamic", "yes"]],
)
def test_the_command_refuses_sizes_that_it_cannot_read(wrong, capsys):
    assert main(["plan", "gpt2", "--limit", "90%", "-q", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_the_command_refuses_a_picture_before_it_plans(capsys, monkeypatch):
    monkeypatch.setattr("hybridremat.cli.plan._planned", lambda *_, **__: pytest.fail("it planned"))
    given = ["plan", "gpt2", "--limit", "90%", "-q", "--sizes", "length=32:64:32", "--curve", "curve.jpg"]
    assert main(given) == 2
    assert "'curve.jpg' has no suffix of a picture" in capsys.readouterr().err

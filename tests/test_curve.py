"""The frontier as data: its points are the plans that can be made, and they cost what steps measure."""

from __future__ import annotations

import csv
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import hybridremat
from hybridremat.analysis import frontier as frontier_module
from hybridremat.analysis.frontier_data import MeasuredPoint
from hybridremat.analysis.frontier_rows import evenly_spaced
from hybridremat.errors import (
    CaptureError,
    InfeasibleLimitError,
    LimitError,
    MissingPackageError,
    ModelError,
    PlanMismatchError,
    PlotError,
)
from hybridremat.planning import option_cache, planner
from hybridremat.plans.records import FrontierPoint
from support.training import small, train_plain
from support.wrapping import HOW, assert_untouched, state_of

pytestmark = pytest.mark.exchanges


@pytest.fixture(scope="module")
def step():
    return small("transformer")


@pytest.fixture(scope="module")
def curve(step):
    model, batch = step
    return hybridremat.frontier(model, kwargs=batch, **HOW)


@pytest.fixture
def no_solving(monkeypatch):
    """Every solver fails, and nothing that was solved before is known."""

    def refuse(*_, **__):
        raise AssertionError("a block is solved")

    monkeypatch.setattr(option_cache, "solve_blocks", refuse)
    monkeypatch.setattr(planner, "OPTIONS", option_cache.OptionCache())


def limits(curve):
    least, plain = curve.least.peak, curve.plain_peak
    return [least, (least + plain) // 2, plain, "70%", "1000%"]


@pytest.mark.slow
def test_points_are_the_plans_of_their_limits(step, curve):
    model, batch = step
    for limit in limits(curve):
        alone = hybridremat.plan(model, kwargs=batch, memory_limit=limit, **HOW)
        plan = curve.plan(memory_limit=limit)
        point = curve.at(memory_limit=limit)
        assert (point.peak, point.overhead, point.extra_flops) == (
            plan.predicted_peak,
            plan.overhead,
            plan.extra_flops,
        )
        assert plan.overhead <= min(p.overhead for p in curve.points if p.peak <= plan.memory_limit) + 1e-12
        assert plan.overhead <= alone.overhead + 0.001
        assert max(plan.predicted_peak, alone.predicted_peak) <= plan.memory_limit
    assert curve.checkpointed == plan.details.checkpointed
    assert curve.plain.peak == plan.plain_peak
    assert curve.least.peak <= plan.least_peak <= 1.01 * curve.least.peak  # a search for the least finds less


def test_an_overhead_chooses_the_smallest_plan_within_it(curve):
    within = [point for point in curve.points if point.overhead <= 0.1]
    found, plan = curve.at(max_overhead="10%"), curve.plan(max_overhead=0.1)  # both search once more
    assert (found.peak, found.overhead) == (plan.predicted_peak, plan.overhead)
    assert found.peak == within[0].peak
    assert found.overhead <= within[0].overhead
    assert len(within) < len(curve.points)


def test_a_plan_of_the_curve_solves_nothing_and_can_be_wrapped(step, curve, no_solving):
    model, batch = step
    with pytest.raises(CaptureError, match="a block is solved"):
        hybridremat.plan(model, kwargs=batch, memory_limit="80%", **HOW)
    plan = curve.plan(memory_limit="80%")
    hybridremat.wrap(model, kwargs=batch, plan=plan, progress=False)
    try:
        assert hybridremat.get_plan(model) == plan
    finally:
        hybridremat.unwrap(model)


@pytest.mark.parametrize(
    ("strategy", "stage"), [("hybrid", "improving"), ("checkmate-lp", "solving"), ("rotor", None)]
)
def test_what_takes_its_time_is_shown(monkeypatch, strategy, stage):
    """A choice that looks for more than the points is shown as it goes, unless nothing is to be shown."""
    model, batch = small("mlp")
    found = hybridremat.frontier(model, kwargs=batch, strategy=strategy, **HOW)
    shown = []

    @contextmanager
    def recorded(*, show):
        yield lambda stage, _done, _total: shown.append((show, stage))

    monkeypatch.setattr(frontier_module, "planning_progress", recorded)
    for show in (False, True):
        replace(found, _show=show).plan(memory_limit="95%")
    assert shown == ([(False, stage), (True, stage)] if stage else [])


def test_what_cannot_be_had_is_said(curve):
    with pytest.raises(InfeasibleLimitError) as caught:
        curve.plan(memory_limit=curve.least.peak - 1)
    assert caught.value.least == curve.least.peak
    with pytest.raises(LimitError, match="neither memory_limit nor max_overhead"):
        curve.plan()
    with pytest.raises(LimitError, match="cannot be read"):
        curve.at(memory_limit="much")


@pytest.mark.slow
def test_measured_peaks_are_the_predicted_ones(step, curve, no_solving):
    model, batch = step
    before = state_of(model)
    measured = curve.measured(model, kwargs=batch, count=3, progress=False)
    assert_untouched(before, model)
    plain, *points = measured.measurements
    assert plain.predicted is None and plain.overhead == 0 and plain.agrees
    assert [each.predicted for each in points] == list(evenly_spaced(curve.points, 3))
    assert [each.peak for each in points] == [each.predicted.peak for each in points]
    assert plain.peak == max(train_plain(model, batch).peaks)
    assert all(each.seconds > 0 and each.agrees for each in points)
    assert measured.points == curve.points and curve.measurements == ()
    assert "as predicted" in str(measured) and "!" not in str(measured)


def test_a_positional_input_and_a_loss_outside_are_measured():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
    x = torch.randn(256, 16)
    curve = hybridremat.frontier(model, (x,), **HOW)
    measured = curve.measured(model, (x,), count=1, loss_fn=lambda y: y.pow(2).sum(), progress=False)
    (each,) = measured.measurements[1:]
    assert each.predicted == curve.least and each.outside >= 256 * 16 * 4
    assert each.peak > each.predicted.peak and not each.agrees
    assert "of it outside the model" in str(measured).splitlines()[-1]


def test_measuring_refuses_what_it_cannot_do(step, curve):
    model, batch = step
    with pytest.raises(LimitError, match="count=0"):
        curve.measured(model, kwargs=batch, count=0)
    other, inputs = small("mlp")
    with pytest.raises(PlanMismatchError, match="it is for Transformer"):
        curve.measured(other, kwargs=inputs, count=1, progress=False)
    model.held = model.head.weight * 1  # no leaf: PyTorch does not copy it
    try:
        with pytest.raises(ModelError, match="cannot be copied"):
            curve.measured(model, kwargs=batch, count=1, progress=False)
    finally:
        del model.held


def test_rows_are_plain_and_complete(curve, tmp_path):
    data = curve.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert [row["peak_bytes"] for row in data["points"]] == [point.peak for point in curve.points]
    assert all(row["share_of_plain"] == row["peak_bytes"] / curve.plain_peak for row in data["points"])
    curve = replace(curve, measurements=(MeasuredPoint(curve.least, curve.least.peak + 4096, 0, 0.5, 0.25),))
    curve.to_csv(tmp_path / "curve.csv")
    with (tmp_path / "curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["kind"] for row in rows[len(curve.points) :]] == ["plain", "checkpointed", "measured plan"]
    assert [(int(row["peak_bytes"]), float(row["overhead"])) for row in rows[: len(curve.points)]] == [
        (point.peak, point.overhead) for point in curve.points
    ]
    assert int(rows[-1]["measured_peak_bytes"]) == curve.least.peak + 4096
    assert [path.name for path in tmp_path.iterdir()] == ["curve.csv"]


def test_the_text_is_short_and_says_how_many_points_there_are(curve):
    many = tuple(FrontierPoint(1000 + number, 1 / (1 + number), 0.0) for number in range(500))
    lines = str(replace(curve, points=many)).splitlines()
    assert "500 points, 25 of them shown" in lines[0]
    assert len(lines) < 30 and "least feasible" in lines[1]
    few = str(replace(curve, points=many[:3])).splitlines()
    assert "3 points" in few[0] and "shown" not in few[0]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40, 41, 100])
def test_spread_points_are_distinct_and_hold_both_ends(count):
    peaks = [number**3 for number in range(40)]
    points = [FrontierPoint(peak, 0.0, 0.0) for peak in peaks]
    chosen = [point.peak for point in evenly_spaced(points, count)]
    assert len(chosen) == min(count, 40) and chosen == sorted(set(chosen))
    assert chosen[0] == 0 and (count == 1 or chosen[-1] == peaks[-1])


MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", MAGIC)
def test_a_picture_is_written_whole_and_the_same_twice(curve, tmp_path, suffix):
    from matplotlib import pyplot

    for name in ("one", "two"):
        curve.plot(tmp_path / f"{name}{suffix}", memory_limit="80%")
    one, two = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "two"))
    assert one.startswith(MAGIC[suffix]) and one == two
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"one{suffix}", f"two{suffix}"]
    assert pyplot.get_fignums() == []


def test_the_picture_shows_every_kind_of_point(curve):
    plain = MeasuredPoint(None, curve.plain_peak + 4096, 0, 0.5, 0.0)
    other = MeasuredPoint(curve.least, 2 * curve.least.peak, 0, 0.5, 0.5)
    figure = replace(curve, measurements=(plain, other)).plot(memory_limit="80%")
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    for start in ("fastest", "least", "each layer", "plain", "chosen", "limit", "measured", "peak not as"):
        assert any(label.startswith(start) for label in labels), (start, labels)
    drawn = next(line for line in axes.lines if line.get_label() == "fastest plan")
    assert list(drawn.get_ydata()) == [100 * point.overhead for point in curve.points]
    chosen = next(line for line in axes.lines if str(line.get_label()).startswith("chosen"))
    assert list(chosen.get_ydata()) == [100 * curve.at(memory_limit="80%").overhead]
    (top,) = axes.child_axes
    figure.canvas.draw()
    assert top.get_xlim()[1] / axes.get_xlim()[1] == pytest.approx(100 / (curve.plain_peak / 1024))


def test_axes_of_the_caller_are_drawn_on(curve):
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert curve.plot(ax=right) is figure
    assert right.lines and not left.lines


def test_pictures_that_cannot_be_made(curve, tmp_path, monkeypatch):
    for name in ("curve.jpeg", "curve"):
        with pytest.raises(PlotError, match="no suffix of a picture"):
            curve.plot(tmp_path / name)
    with pytest.raises(InfeasibleLimitError):
        curve.plot(tmp_path / "curve.png", memory_limit=1)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'hybridremat\[plots\]'"):
        curve.plot(tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []

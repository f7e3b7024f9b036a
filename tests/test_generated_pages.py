"""What scripts write into pages: from rows to tables, with nothing written by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import answers
import chains
import chunked
import compare_marks
import compiled
import compiled_page
import demo
import differences
import front_door
import fsdp
import fused_losses
import gaps
import generated
import marks
import offload
import offload_table
import planning
import pytest
import real_size
import reference
import rewrite_times
import scale
import search
import sizes
import step_times
import strategies
import tune
import units
from matplotlib.figure import Figure

WHEN = {"load": "0.5", "date": "2026-11-23", "torch": "2.13.0"}
PARTS = [
    *((script, script.PAGE, script.part) for script in (planning, chains, scale, search, step_times)),
    *((script, script.PAGE, script.part) for script in (gaps, strategies, demo, units, offload)),
    *((script, script.PAGE, script.part) for script in (real_size, sizes)),
    *((script, script.PAGE, lambda _, script=script: script.part()) for script in (answers, fsdp)),
    *((script, script.PAGE, script.part) for script in (compiled, chunked, fused_losses)),
    *((script, script.PAGE, script.part) for script in (rewrite_times, tune)),
    (compare_marks, compare_marks.PAGE, compare_marks.frontiers_part),
]


def row(how: str, seconds: float, **stages: float) -> dict[str, str]:
    text = {"model": "U-Net", "how": how, "seconds": str(seconds), "stages": json.dumps(stages)}
    return text | WHEN


def test_the_least_of_repeats_is_held_against_what_was_asked_for() -> None:
    rows = [row("plain", 3.0), row("plain", 2.0), row("planned cold", 5.2, solve=1.0, compose=2.0)]
    (line,) = list(planning.table([*rows, row("planned warm", 1.0)]))[2:]
    assert line == "| U-Net | 2.0 s | 5.2 s | **2.60**, 2.5 | 1.0 s | solve 1.0, compose 2.0 |"
    (line,) = list(planning.table([*rows, row("planned cold", 5.0), row("planned warm", 1.0)]))[2:]
    assert "| 2.50, 2.5 |" in line


@pytest.mark.parametrize(("script", "page", "part"), PARTS, ids=lambda each: getattr(each, "__name__", None))
def test_the_page_holds_the_rows_that_are_kept(script, page, part) -> None:
    rows = getattr(script, "ROWS", None)
    assert generated.written(page, script.SCRIPT) == part(generated.read_rows(rows) if rows else None)


def test_the_page_holds_the_least_peaks_that_are_kept() -> None:
    found = generated.written(compare_marks.PAGE, compare_marks.FLOORS)
    assert found == compare_marks.floors_part(generated.read_rows(compare_marks.ROWS))


def frontier_row(**figures: object) -> dict[str, str]:
    """A row of Llama that is as good as the record, but for the figures given."""
    extra = json.dumps(dict.fromkeys(compare_marks.SHARES, 2.0) | {25: None})
    least = {"least": 20.0, "least_none": 28.1, "least_loss": 19.04, "least_in_backward": 12.9}
    beside = {"above_none": 0.0, "above_none_at": 90, "below_none": -9.5, "below_none_at": 30.25}
    found = {"worst": 0.0, "worst_at": 36.9, "planning": 4.6, **least, **beside, **figures}
    kept = {name: str(figure) for name, figure in found.items()}
    return {"model": "llama", "extra": extra, "per_layer": "[21.55]", **kept, **WHEN}


def test_frontiers_stand_beside_the_recorded_ones() -> None:
    _, recorded = marks.recorded_frontier("llama")
    (line,) = list(compare_marks.table([frontier_row(worst=0.571)]))[2:]
    theirs = marks.extra_at(recorded, 60)
    assert line.startswith("| Llama | 2.0 / 0.0 | ") and f" | 2.0 / {theirs:.1f} | " in line
    assert line.endswith(" | – | 20.00 / 28.95 | 0.57 at 36.9 % | 5 s |")
    assert list(compare_marks.checkpoint_table([frontier_row()]))[-1] == (
        "| Llama | one checkpoint a layer | 32.3 % | 23.0 % | 21.6 % |"
    )


def test_least_peaks_stand_beside_one_another() -> None:
    text = compare_marks.floors_part([frontier_row()])
    assert "\n| Llama | 28.1 % | 20.0 % | 19.0 % | 12.9 % |\n" in text
    assert "is the default frontier slower, and it is up to 9.5 points of time below (Llama at" in text
    text = compare_marks.floors_part([frontier_row(), frontier_row(above_none=0.011)])
    assert "more than 0.02 points of time above it" in text


def test_frontiers_that_have_become_worse_are_named() -> None:
    assert not list(compare_marks.worse(frontier_row(worst=1.0, above_none=2.0)))
    assert list(compare_marks.worse(frontier_row(worst=1.01))) == [
        "llama: extra flops above the record by 1.01 points"
    ]
    assert len(list(compare_marks.worse(frontier_row(least=30.1, above_none=2.1)))) == 2


def gap_row(limit: str, gap: float, bound: float) -> dict[str, str]:
    figures = {"percent": 26.4, "overhead": 8.04, "gap": gap, "least": 24.0, "least_bound": bound}
    kept = {name: str(figure) for name, figure in {**figures, "seconds": 1.0}.items()}
    return {"model": "gpt2_0.1", "limit": limit, **kept, **WHEN}


def test_gaps_stand_below_their_limits() -> None:
    rows = [gap_row("70 %", 0.31, 20.1), gap_row("30 %", 2.0, 20.25), gap_row(gaps.NEAR, 5.3, 20.2)]
    assert list(gaps.table(rows))[2:] == [
        "| GPT-2, dropout 0.1 | 8.0 %, 0.31 | – | – | 8.0 %, 2.00 | 8.0 %, 5.30 (at 26.4 %) "
        "| 24.00 %, 20.25 |"
    ]


def move_row(limit: str, **figures: float) -> dict[str, str]:
    kept = dict.fromkeys(offload.COLUMNS, "") | {name: str(figure) for name, figure in figures.items()}
    model = next(iter(offload.MODELS))
    return kept | {"model": model, "link": "25.0", "limit": limit, "capture": "60", **WHEN}


def test_moves_stand_beside_recomputation_a_bound_and_others() -> None:
    found = {"ours": 5.86, "bound": 3.85, "seconds": 13}
    rows = [
        move_row("40 %", recomputed=18.04, **found),
        move_row("25 %", **found),
        move_row("offload-all", percent=31.7, theirs=124.1, **found),
        move_row("offload-inputs", percent=30.1, theirs=25.4, **found),
        move_row("least", percent=26.0, alone=26.8, **found),
    ]
    assert sorted(rows, key=offload_table.place) == rows
    (line,) = list(offload_table.table(rows))[2:]
    assert line.endswith("a10, 25 | 18.0 / 5.9 (3.9) | – / 5.9 (3.9) | 26.8 → 26.0 %: 5.9 |")
    (line,) = list(offload_table.peers_table(rows))[2:]
    assert line.endswith("a10, 25 | 31.7 %: 124.1 / 5.9 | 30.1 %: 25.4 / 5.9 |")
    (line,) = list(offload_table.table([move_row("25 %"), rows[-1]]))[2:]
    assert "25 | – | 26.8" in line


def strategy_rows(slower: float) -> list[dict[str, str]]:
    at = {"faster": "3.06", "faster_at": "40.0", "slower": str(slower), "slower_at": "61.25"}
    names = (strategies.DEFAULT, *strategies.OTHERS)
    rows = [{"model": "unet", "strategy": name, "least": "34.44", **at, **WHEN} for name in names]
    return rows[:1] + [{**row, "least": "50.0"} for row in rows[1:]]


def test_strategies_stand_beside_the_default() -> None:
    (line,) = list(strategies.table(strategy_rows(0.0)))[2:]
    assert line == "| U-Net | 34.4 % |" + " 50.0 %, 3.1 |" * 5
    assert strategies.slower(strategy_rows(0.004)) == "At no peak of any is `hybrid` slower."
    assert "slower by 0.20 points at most: U-Net beside `rockmate`, at 61.2" in strategies.slower(
        strategy_rows(0.2)
    )


class Frontier:
    """Points of peak and overhead; plans for a limit are a hundredth faster than these."""

    def __init__(self, *points: tuple[int, float]) -> None:
        self.points = [point_of(*point) for point in points]
        self.least = self.points[0]

    def at(self, *, memory_limit: int) -> SimpleNamespace:
        fitting = [point for point in self.points if point.peak <= memory_limit]
        return point_of(memory_limit, fitting[-1].overhead - 0.01)


def point_of(peak: int, overhead: float) -> SimpleNamespace:
    return SimpleNamespace(peak=peak, overhead=overhead)


def test_a_frontier_is_planned_for_a_limit_where_it_is_slower() -> None:
    ours = Frontier((20, 0.5), (40, 0.25), (60, 0.0))
    theirs = Frontier((10, 0.9), (30, 0.625), (50, 0.125))
    found = differences.differences(ours, theirs)  # type: ignore[arg-type]
    assert [each.peak for each in found] == [30, 50]
    assert [each.points for each in found] == pytest.approx([-12.5, 11.5])
    beside = strategies.beside(found, 100)
    assert beside == {"faster": 12.5, "faster_at": 30.0, "slower": 11.5, "slower_at": 50.0}


def demo_text(**changes: object) -> dict[str, str]:
    peaks = {"plain_eager_peak": 2000, "plain_peak": 1500, "predicted_peak": 850, "measured_peak": 850}
    costs = {"overhead": 0.048, "extra_flops": 0.006, "time_ratio": 0.87, "planning_seconds": 7.8}
    limits = {"limit": 900, "reserve": 0, "needed": 850}
    figures = {**peaks, **costs, **limits, "differing": "[]", **changes}
    kept = {name: str(figure) for name, figure in figures.items()}
    return {"model": "GPT-2, dropout 0.1", "note": "60%", **kept, **WHEN}


def test_the_demos_rows_are_read_and_shown_as_it_shows_them() -> None:
    row = demo.demo_row(demo_text(differing='["step 2: loss"]'))
    assert (row.limit, row.overhead, row.differing, row.passed) == (900, 0.048, ("step 2: loss",), False)
    lines = demo.printed([demo_text()]).splitlines()
    assert lines[0].endswith("2 cores with a load of 0.5, 2026-11-23")
    assert lines[3] == "```text" and lines[-1] == "```"
    assert lines[-3].split()[-6:] == ["+4.8%", "+0.6%", "0.87", "7.8", "s", "yes"]


def test_the_demos_figures_are_told() -> None:
    reserved = {"reserve": 64, "planning_seconds": 29.6, "measured_peak": 880}
    text = demo.part([demo_text(), demo_text(measured_peak=849), demo_text(**reserved)])
    assert "took 8 to 30 s of wall clock" in text and "In all 3 rows every loss" in text
    assert "the predicted one to the byte in 1 of 2 rows" in text
    assert "In 1 of 2 rows every loss" in demo.part([demo_text(), demo_text(measured_peak=901)])


def compiled_row(kind: str, **figures: object) -> dict[str, str]:
    kept = dict.fromkeys(compiled.COLUMNS, "") | {name: str(figure) for name, figure in figures.items()}
    return kept | {"model": "unet", "part": kind, "kind": kind} | WHEN


def test_plans_that_take_more_than_half_of_stocks_extra_flops_are_marked() -> None:
    at = {"method": "budget", "budget": "0.4", "limit": 81_000_000}  # stock takes 0.9 % there
    kept, failed = (
        compiled_row(compiled.BESIDE, peak=80_000_000, extra=extra, **at) for extra in (1.0, 1.01)
    )
    *_, line = compiled_page.beside_table([kept])
    assert line.startswith("| U-Net | budget 0.4 | ") and line.endswith(" | 1.0 % |")
    *_, line = compiled_page.beside_table([failed])
    assert line.endswith(" | 1.0 % (1.0 was asked for) |")
    *_, line = compiled_page.beside_table([compiled_row(compiled.BESIDE, **at)])
    assert line.endswith(" | – | – |")
    assert len([*compiled_page.unreached([kept, failed])]) == 1


def test_compiled_steps_that_miss_their_prediction_or_limit_are_counted() -> None:
    rows = [
        compiled_row(compiled.LIMITS, limit=100, peak=99, measured="[99, 99, 98]"),
        compiled_row(compiled.LIMITS, limit=200, peak=199, measured="[199, 199, 201]"),
    ]
    text = next(compiled_page.limits_table(rows))
    assert "in 4 of 6 steps the measured peak was the predicted one to the byte, and in 5 under" in text


def test_times_of_compiled_steps_carry_their_own_day() -> None:
    old = compiled_row(compiled.TIMES, limit="100%", measured=1.25) | {"load": "", "date": "2026-11-22"}
    half = old | {"limit": "50%", "extra": "20.0", "measured": "1.5"}
    *_, line = compiled_page.times_table([old, half])
    assert line.startswith("| U-Net | 1.25 (1.02 was asked for) | 1.50 | 1.20 | 1.20 | – | ")
    assert line.endswith(" | 2026-11-22, other work |")


def test_tasks_that_have_rows_are_left_unless_they_are_asked_for_again(tmp_path, monkeypatch) -> None:
    made: list[tuple[str, ...]] = []

    def in_a_process(script, here, *task, environment):
        made.append(task)
        return [dict(zip(("name", "part", "n"), (*task, len(made)), strict=True))]

    monkeypatch.setattr(generated, "in_a_process", in_a_process)
    path, tasks = tmp_path / "rows.csv", [("a", "x"), ("a", "y")]
    how = (path, ("name", "part", "n"), tasks)
    generated.write_rows(path, how[1], [{"name": "a", "part": "x", "n": 9}])
    assert [row["n"] for row in generated.gone_on("script", *how, again=False)] == ["9", "1"]
    assert made == [("a", "y")]
    assert [row["n"] for row in generated.gone_on("script", *how, again=True)] == ["2", "3"]


def test_models_are_named_as_pages_name_them() -> None:
    names = [reference.title(name) for name in marks.recorded_models()]
    assert len(set(names)) == 8 and "GPT-2, dropout 0.1" in names


def test_rows_are_read_as_they_were_written(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    assert generated.read_rows(path) == []
    generated.write_rows(path, ("a", "b"), [{"a": "1, 2"}, {"a": "3", "b": "4"}])
    assert generated.read_rows(path) == [{"a": "1, 2", "b": ""}, {"a": "3", "b": "4"}]


def test_the_front_doors_picture_has_every_step_that_was_run() -> None:
    rows = generated.read_rows(front_door.ROWS)
    axes = Figure().add_subplot()
    front_door.draw(axes, rows, "unet")
    for line in axes.get_lines()[:-1]:  # the last is plain's time
        (method,) = (name for name, (label, *_) in front_door.METHODS.items() if label == line.get_label())
        key = ("unet", method, "cpu")
        mine = [row for row in rows if (row["model"], row["method"], row["device"]) == key]
        ratios = [float(row["time_ratio"]) for row in mine if row["time_ratio"] and row["peak_bytes"]]
        assert sorted(line.get_ydata()) == pytest.approx(sorted(100 * (ratio - 1) for ratio in ratios))
    assert len(axes.get_lines()) > 4

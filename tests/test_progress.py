"""How far planning is: one bar over its stages on a terminal, lines elsewhere, a line for each new shape."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
from contextlib import nullcontext, suppress

import pytest
import torch
from rich.console import Console
from torch import nn

import hybridremat
from hybridremat.planning import progress, stage_weights
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.progress_bar import planning_bar
from hybridremat.planning.stage_weights import USUAL, Position
from support.training import small
from support.wrapping import HOW


class Clock:
    """A clock that is set by hand, in seconds."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (progress, stage_weights, sys.modules[planning_bar.__module__]):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(progress, "SOON", 2)
    stage_weights.forget()
    yield made
    stage_weights.forget()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def nobody_asked(monkeypatch):
    """The level that the log has where nobody asked for it."""
    monkeypatch.setattr(progress.logger, "level", logging.WARNING)
    progress.logger.manager._clear_cache()
    yield
    monkeypatch.undo()
    progress.logger.manager._clear_cache()


def test_the_share_that_is_done_never_falls():
    """Whatever stages come, left out, again, or out of order; it ends at no more than the whole."""
    position, seen = Position(), []
    again = [*USUAL, "segmenting", "solving blocks", "composing", "measuring", "polishing", "emitting"]
    for stage in again:
        for done in range(4):
            position.move(stage, done, 3)
            seen.append(position.share)
    assert seen == sorted(seen)
    assert seen[0] == 0 < seen[5] < seen[-1] == pytest.approx(1)


def test_stages_weigh_what_they_took_earlier(clock):
    """A stage that took nearly all of some plannings is nearly all of the next one's bar."""
    for _ in range(8):
        position = Position()
        for stage in USUAL:
            position.move(stage, 0, 1)
            clock.now += 100 if stage == "composing" else 0.1
        position.end()
    following = Position()
    following.move("composing", 0, 1)
    assert following.share < 0.02
    following.move("composing", 1, 1)
    assert following.share > 0.95


def drawn(clock, *moves):
    """What a terminal shows: the text after each move (seconds before it, stage, done, total)."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, get_time=lambda: clock.now)
    texts = []
    with planning_bar(console) as move:
        for seconds, *moved in moves:
            clock.now += seconds
            move(*moved)
            texts.append(shown(file))
    return [shown(file), *texts]


def shown(file):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n")


def test_one_bar_over_all_stages(clock):
    """Time that is left is said once it is known, of all stages; none of it stands as --:--."""
    *_, last = drawn(
        clock,
        (9.0, "timing kernels", 0, 100),
        (2.0, "timing kernels", 50, 100),
        (2.0, "segmenting", 0, 3),
        (2.0, "composing", 0, 1),
        (2.0, "improving", 0, 1),
    )
    assert "--" not in last
    assert "capturing" in drawn(clock)[0]
    final = last.splitlines()[-1]
    assert "improving" in final
    before = sum(USUAL[each] for each in list(USUAL)[: list(USUAL).index("improving")])
    rest = (sum(USUAL.values()) - before) / before
    assert f"about {8 * rest:.0f} s left" in final


def test_other_stages_are_counted(clock):
    *_, last = drawn(clock, (1.0, "measuring", 2, 7))
    assert "measuring" in last
    assert "2/7" in last


def lines(capsys):
    return [line.removeprefix("hybridremat: ") for line in capsys.readouterr().err.splitlines()]


def test_without_a_terminal_a_line_a_stage(clock, capsys, nobody_asked):
    """Each as it begins, with the time so far, once; nothing of a quick planning."""
    with planning_progress() as move:
        clock.now += 5
        for done in range(10):
            move("composing", done, 10)
        clock.now += 7
        move("improving", 0, 1)
    assert lines(capsys) == ["composing (5 s so far)", "improving (12 s so far)", "planned in 12 s"]
    with planning_progress() as move:
        clock.now += 1
        move("composing", 0, 1)
    assert lines(capsys) == []


def test_long_planning_says_what_takes_so_long_and_what_helps(clock, capsys, nobody_asked):
    took = ("trying kernels", 4), ("solving blocks", 2), ("composing", 29), ("improving", 1)
    with planning_progress() as move:
        for stage, seconds in took:
            clock.now += seconds
            move(stage, 0, 1)
    said = "planning has taken 35 s so far, 29 of them solving blocks: give a time (planning_budget=20)"
    assert [line for line in lines(capsys) if "so far," in line] == [f"{said}, or a higher limit"]
    with planning_progress() as move:
        clock.now += 40
        move("training", 1, 2)
        clock.now += 40
        move("training", 2, 2)
    assert not [line for line in lines(capsys) if "training:" in line]


def test_what_is_no_planning_is_not_said_to_be_planned(clock, capsys, nobody_asked):
    with planning_progress() as move:
        clock.now += 5
        move("training", 1, 2)
    assert lines(capsys) == ["training (5 s so far)"]


def test_a_capture_that_goes_on_is_said(capsys, nobody_asked, monkeypatch):
    """It reports nothing until it is over: a clock says so. What fails is not said to be planned."""
    monkeypatch.setattr(progress, "SOON", 0.05)
    with suppress(ValueError), planning_progress(first="capturing the step of Net"):
        time.sleep(0.5)
        raise ValueError
    assert lines(capsys) == ["capturing the step of Net"]


def test_one_process_of_a_group_speaks(capsys, nobody_asked, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with planning_progress(first="capturing"):
        progress.say("here")
    assert lines(capsys) == []


def test_on_a_terminal_nothing_is_left(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with planning_progress(first="capturing the step") as move:
        move("composing", 1, 2)
    assert "composing" in terminal.getvalue()
    assert "capturing the step" not in terminal.getvalue()


@pytest.mark.parametrize("show", [True, False])
def test_a_line_for_each_new_shape(show, capsys, caplog, nobody_asked):
    """On the error stream, or in the log alone with ``progress=False``; none for a shape that is known."""
    model, batch = small("mlp")
    how = {**HOW, "progress": show, "dynamic": False}
    hybridremat.wrap(model, kwargs=batch, memory_limit="90%", **how)
    capsys.readouterr()
    with nullcontext() if show else caplog.at_level(logging.INFO, logger="hybridremat.progress"):
        for rows in (40, 30, 40):
            model(batch["x"][:rows]).backward()
    found = caplog.messages if not show else lines(capsys)
    texts = [re.sub(r"in [\d.]+ s", "in … s", line) for line in found if "new shape" in line]
    assert texts == [
        "new shape 40×32: planned in … s, 2 of 64",
        "new shape 30×32: planned in … s, 3 of 64",
    ]
    assert capsys.readouterr().err == ""


def test_a_line_for_the_capture_of_all_sizes_and_none_for_each(capsys, nobody_asked):
    model, batch = small("mlp")
    hybridremat.wrap(model, kwargs=batch, memory_limit="90%", **{**HOW, "progress": True})
    capsys.readouterr()
    for rows in (40, 30, 50):
        model(x=batch["x"][:rows]).backward()
    texts = [re.sub(r"in [\d.]+ s", "in … s", line) for line in lines(capsys) if "new shape" in line]
    assert texts == ["new shape 40×32: captured for all sizes in … s"]


@pytest.mark.parametrize("shown", [True, False])
def test_a_pipeline_says_what_it_plans(shown, capsys, nobody_asked, monkeypatch):
    monkeypatch.setattr(progress, "SOON", 0)
    tower = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    how = {"stages": 2, "microbatches": 2, "device_memory": "1MiB", "cost_model": "flops", "progress": shown}
    hybridremat.pipeline_plan(tower, (torch.zeros(4, 8),), **how)
    said = [line.partition(" (")[0] for line in lines(capsys)]
    assert [each for each in said if each in ("planning layers", "planning stages")] == (
        ["planning layers", "planning stages"] if shown else []
    )

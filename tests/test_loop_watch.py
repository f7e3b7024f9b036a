"""What the callbacks share, driven by a loop written by hand."""

from __future__ import annotations

import re
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hybridremat
from hybridremat.graph.costs import cuda_recorder
from hybridremat.graph.costs.allocations import record
from hybridremat.graph.costs.cpu_recorder import CpuRecorder
from hybridremat.graph.costs.recorder import peak_of_new
from hybridremat.integrations import loop_measuring as step_times
from hybridremat.integrations.loop import LoopWatch
from hybridremat.integrations.loop_figures import StepLog
from hybridremat.integrations.loop_measuring import StepPeaks, StepTimes
from hybridremat.integrations.loop_options import find_target, loop_options
from hybridremat.integrations.loop_report import FOLDER
from hybridremat.units import format_bytes
from support.cuda_stand_in import Allocator
from support.loop_cases import HOW, MEASURED, PREDICTED, profiler_runs
from support.training import allocated_peak, small


def watch(model, **options):
    asked = {name: options.pop(name) for name in ("memory_limit", "dynamic") if name in options}
    made = LoopWatch(loop_options({"memory_limit": "100%", **HOW, **asked}, **options))
    made.begin(model)
    return made


def step(watched, model, batch):
    """One step of a loop; returns what it logs."""
    watched.step_begins()
    model(**batch)["loss"].backward()
    watched.backward_ends()
    watched.step_ends()
    model.zero_grad()
    return watched.log.entry()


def run(model, batch):
    model(**batch)["loss"].backward()
    model.zero_grad()


def test_the_measured_peak_is_what_another_measurement_finds():
    model, batch = small("transformer")
    watched = watch(model, measure_every=1)
    entries = [step(watched, model, batch) for _ in range(3)]
    assert [MEASURED in entry for entry in entries] == [False, True, True]
    found = allocated_peak(lambda: run(model, batch))
    assert {entry[MEASURED] for entry in entries[1:]} == {found}
    watched.end()
    assert model._compiled_call_impl is None
    watched.end()


@pytest.mark.filterwarnings("ignore::hybridremat.OutstandingForwardWarning")
@pytest.mark.filterwarnings("ignore::hybridremat.PredictionWarning")
def test_schedules_take_turns_once_the_plan_is_the_one_that_stays(monkeypatch, recwarn):
    monkeypatch.setattr("hybridremat.planning.candidates.WINDOW", 0.5)
    model, batch = small("transformer")
    watched = watch(model, memory_limit="85%", tune_steps=4, measure_every=1, tolerance=0.0)
    entries = [step(watched, model, batch) for _ in range(7)]
    assert len({entry[PREDICTED] for entry in entries[2:6]}) == 2
    assert all(entry[MEASURED] == entry[PREDICTED] for entry in entries[2:])
    assert hybridremat.get_plan(model).tuning.steps == 4
    assert not [each for each in recwarn if each.category is hybridremat.PredictionWarning]
    watched.end()


def test_what_cannot_be_tuned_is_said_and_trains_on(caplog):
    model, batch = small("transformer")
    watched = watch(model, dynamic=True, tune_steps=4)
    for _ in range(4):
        step(watched, model, batch)
    assert "tune_steps=4: the latest plan" in caplog.text
    assert caplog.text.count("tune_steps") == 1
    watched.end()


def test_a_measurement_makes_way_for_a_plan_that_is_needed_meanwhile():
    """The step that is measured has another forward, of a shape that comes for the first time."""
    model, batch = small("transformer")
    watched = watch(model)
    step(watched, model, batch)
    other = {"tokens": batch["tokens"][:1, :17]}
    loss = model(**batch)["loss"]
    (loss + model(**other)["loss"]).backward()
    watched.backward_ends()
    assert MEASURED not in watched.log.entry()
    model.zero_grad()
    assert MEASURED in step(watched, model, batch)  # it is made up for
    watched.end()


def test_a_profiler_of_the_loop_is_left_alone():
    model, batch = small("transformer")
    watched = watch(model)
    step(watched, model, batch)
    with torch.profiler.profile():
        assert MEASURED not in step(watched, model, batch)
    assert MEASURED in step(watched, model, batch)
    watched.end()


def test_a_failing_forward_ends_its_measurement():
    model, batch = small("transformer")
    watched = watch(model)
    step(watched, model, batch)
    with pytest.raises(IndexError):
        model(tokens=batch["tokens"] + 1000)
    assert not profiler_runs()
    watched.end()


def test_what_its_owner_wraps_anew_or_unwraps_is_left():
    model, batch = small("transformer")
    watched = watch(model)
    step(watched, model, batch)
    hybridremat.unwrap(model)
    hybridremat.wrap(model, kwargs=batch, memory_limit="90%", **HOW)
    call = model._compiled_call_impl
    watched.end()
    assert model._compiled_call_impl is call


def test_there_is_no_plan_before_the_first_step():
    model, batch = small("transformer")
    watched = watch(model)
    assert watched.log.entry() == {}
    with pytest.raises(hybridremat.ModelError, match="no plan yet"):
        hybridremat.get_plan(model)
    entry = step(watched, model, batch)
    assert entry[PREDICTED] == hybridremat.get_plan(model).predicted_peak
    watched.end()


def test_a_plan_that_is_given_is_the_one_that_runs(tmp_path):
    model, batch = small("transformer")
    made = hybridremat.plan(model, kwargs=batch, memory_limit="90%", **HOW)
    made.save(tmp_path / "plan.json")
    watched = LoopWatch(loop_options({"plan": tmp_path / "plan.json", "progress": False}))
    watched.begin(model)
    assert step(watched, model, batch)[PREDICTED] == made.predicted_peak
    assert hybridremat.get_plan(model).schedule == made.schedule
    watched.end()
    with pytest.raises(hybridremat.LimitError, match="not both"):
        loop_options({"plan": made, "memory_limit": "90%"})


def test_the_target_is_the_wrapped_part_or_what_is_named():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert find_target(model, None) is model
    assert find_target(model, "0.0") is model[0][0]
    wrapped = watch(model[0])
    assert find_target(model, None) is model[0]
    with pytest.raises(hybridremat.ModelError, match="already wrapped: 0"):
        find_target(model, "1")
    wrapped.end()


def test_an_open_recording_is_given_up_for_another_measurement():
    recorder = CpuRecorder(interruptible=True)
    recorder.start()
    kept = torch.empty(100)
    assert record("cpu", lambda mark: torch.empty(7)).peak > 0
    assert recorder.stop() is None and recorder.stop() is None
    del kept


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 9))))
def test_the_peak_of_what_is_new_leaves_foreign_frees_out(drawn):
    """Against a sum over the records from which the frees of unknown addresses have been struck out."""
    alive, records, own = {}, [], []
    for allocates, address, size in drawn:
        if allocates and address not in alive:
            alive[address] = size
            records.append((address, size))
            own.append(size)
        elif not allocates:
            known = address in alive
            size = alive.pop(address, size)
            records.append((address, -size))
            own += [-size] * known
    assert peak_of_new(records) == max([0, *accumulate(own)])


@pytest.fixture
def cuda(monkeypatch):
    allocator = Allocator()
    monkeypatch.setattr(cuda_recorder, "torch", SimpleNamespace(cuda=allocator))
    return allocator


def test_on_cuda_every_step_but_the_first_is_measured(cuda):
    peaks, found = StepPeaks("cuda", None), []
    for size in (50, 30, 40, 10):
        cuda.allocate(7)  # what stays after each step is not the next one's
        peaks.begin()
        cuda.allocate(size)
        cuda.allocate(-size)
        found.append(peaks.end())
    assert found == [None, 30, 40, 10] and not peaks.rare


def test_gradients_that_are_dropped_within_a_step_do_not_hide_its_peak(cuda):
    peaks = StepPeaks("cuda", None)
    peaks.end()
    cuda.allocate(100)  # gradients of the step before
    peaks.begin()
    cuda.allocate(40)
    peaks.pause()
    cuda.allocate(-100)
    peaks.resume()
    cuda.allocate(20)
    assert peaks.end() == 60


def test_every_other_step_is_measured_if_asked(cuda):
    peaks, found = StepPeaks("cuda", 2), []
    for _ in range(6):
        peaks.begin()
        cuda.allocate(5)
        cuda.allocate(-5)
        found.append(peaks.end())
    assert found == [None, 5, None, 5, None, 5] and peaks.rare


def some_plan(size):
    return SimpleNamespace(
        predicted_peak=size, overhead=0.1, plain_peak=4 * size, memory_limit=2 * size, fingerprint=str(size),
        planning_seconds=1.5, timings={"costs": 1.5}, others=None,
    )  # fmt: skip


def test_plans_are_counted_once_for_each_shape_and_again_if_made_again():
    log, first, second = StepLog(), some_plan(1 << 20), some_plan(1 << 21)
    for plan in (first, second, first, second):
        log.ran(plan)
    entry = log.entry()
    assert log.plans == (first, second)
    assert (entry["hybridremat/plans"], entry["hybridremat/planning_seconds"]) == (2, 3.0)
    assert (entry["hybridremat/plain_peak_bytes"], entry["hybridremat/limit_bytes"]) == (1 << 23, 1 << 22)
    assert (entry["hybridremat/predicted_peak_mib"], entry["hybridremat/limit_mib"]) == (2.0, 4.0)
    again = some_plan(1 << 20)
    again.timings = {"costs": 1.25}
    log.ran(again)
    assert log.plans == (again, second) and log.entry()["hybridremat/planning_seconds"] == 4.5


def test_of_the_plans_of_one_capture_the_largest_is_kept_whole():
    log, capture = StepLog(), object()

    def plan(size, others):
        made = some_plan(size)
        made.others, made.figures = others, lambda: SimpleNamespace(**vars(made), short=True)
        return made

    plans = [plan(1 << size, capture) for size in (20, 22, 21, 23, 19)]
    alone = plan(1 << 30, None)
    for each in (plans[0], alone, *plans[1:]):
        log.ran(each)
    whole = [each for each in log.plans if not hasattr(each, "short")]
    assert whole == [alone, plans[3]] and len(log.plans) == 6


def test_a_run_ends_with_one_line_and_keeps_its_plans(tmp_path, caplog):
    model, batch = small("transformer")
    watched = watch(model)
    for _ in range(2):
        entry = step(watched, model, batch)
    with caplog.at_level("INFO", logger="hybridremat"):
        watched.finish(tmp_path)
        watched.end()
    (plan,) = watched.log.plans
    peak, plain = format_bytes(entry[MEASURED]), format_bytes(plan.plain_peak)
    start = f"peak {peak} instead of {plain}, {100 * plan.overhead:+.1f} %, 1 shape, "
    line = re.escape(start) + r"\d+ s planning"
    report = tmp_path / "hybridremat-report" / "plan.html"
    assert re.fullmatch(rf"{line}; report: {re.escape(str(report))}", caplog.messages[-1])
    assert report.read_text().startswith("<!doctype html>")
    assert report.with_name("frontier.png").read_bytes().startswith(b"\x89PNG")
    watched.finish(tmp_path)  # over already: nothing is said twice
    assert sum(message.startswith("peak ") for message in caplog.messages) == 1


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    model, batch = small("transformer")
    watched = watch(model)
    step(watched, model, batch)
    (tmp_path / "hybridremat-report").write_text("a file, where a folder should be")
    watched.finish(tmp_path)
    assert "no report" in caplog.text and watched.summary.report is None
    watched.end()


def test_of_several_measurements_the_largest_is_logged_beside_its_own_plan():
    log = StepLog()
    plans = [some_plan(size) for size in (100, 300, 200)]
    for plan in plans:
        log.ran(plan)
        log.measured(SimpleNamespace(plan=plan, measured=plan.predicted_peak + 1), due=False)
    entry = log.entry()
    assert (entry[PREDICTED], entry[MEASURED]) == (300, 301)
    assert log.entry()[PREDICTED] == 200 and not log.waiting


def test_the_measured_overhead_is_that_of_medians(monkeypatch):
    times = StepTimes(3)
    for seconds, planned, counts in [
        (1.0, False, True),
        (9.0, False, True),
        (2.0, False, True),
        (60.0, True, False),
        (3.0, True, True),
        (80.0, True, False),
        (2.5, True, True),
        (40.0, True, True),
    ]:
        clock = iter((10.0, 10.0 + seconds))
        monkeypatch.setattr(step_times, "_now", lambda clock=clock: next(clock))
        assert planned or times.in_plain_steps
        times.begin()
        times.end(planned=planned, counts=counts)
    assert not times.in_plain_steps and times.overhead == pytest.approx(0.5)


def test_the_reports_folder_is_no_package():
    """An empty folder of a package's name shadows one that is installed by a path, in scripts beside it."""
    assert not FOLDER.isidentifier()

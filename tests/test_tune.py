"""Schedules that take turns in real steps: the numbers of plain training, in the bytes that each predicts."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import schedule_time
from hybridremat.planning.candidates import candidates, with_wrong_times
from hybridremat.planning.ranks import ALONE
from hybridremat.runtime.planned_call import planned_call
from support.processes import run_ranks
from support.training import Mlp, allocated_peak, loss_in, small, train, train_plain
from support.wrapping import HOW

STEPS = 12


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """So wide that small nets, each of whose ops is a large share of the step, have several schedules."""
    monkeypatch.setattr("hybridremat.planning.candidates.WINDOW", 0.5)


class RunsAs:
    """A clock on which each step takes what its schedule does by times that are not those of the plan."""

    def __init__(self, model, seconds):
        self.model, self.seconds, self.now, self.ran = model, seconds, 0.0, []

    def __call__(self):
        plan = hybridremat.get_plan(self.model)
        self.ran.append(plan.schedule)
        self.now += self.seconds(plan)
        return self.now


@pytest.fixture
def on_clock(monkeypatch):
    """Lets the steps of a model take what a function says for their plans."""

    def install(model, seconds):
        clock = RunsAs(model, seconds)
        monkeypatch.setattr("hybridremat.runtime.tune.clock_of", lambda _: clock)
        return clock

    return install


def wrapped(name="mlp", limit="85%", **how):
    model, batch = small(name)
    return hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **HOW, **how), batch


def tune(model, steps=STEPS):
    return hybridremat.tune(model, steps=steps, progress=False)


def train_on(model, batch, steps):
    for _ in range(steps):
        loss_in(model(**batch)).backward()


def train_noting_plans(model, batch, steps):
    """What training made, and the plan of each step once its forward has run."""
    plans = []

    def noting(output):
        plans.append(hybridremat.get_plan(model))
        return loss_in(output)

    return train(model, batch, steps=steps, loss_in=noting), plans


def prefer(number):
    """Seconds of a plan by which one of the plans that take turns is the fastest."""
    return lambda plans: lambda plan: 1.0 if plan.schedule == plans[number].schedule else 2.0


@pytest.mark.parametrize("name", ["mlp", "convnet", pytest.param("transformer", marks=pytest.mark.slow)])
def test_all_steps_are_those_of_plain_training_in_the_bytes_that_each_predicts(name, on_clock):
    model, batch = small(name)
    plain = train_plain(model, batch, steps=STEPS + 2)
    planned = hybridremat.wrap(model, kwargs=batch, memory_limit="85%", **HOW)
    given = hybridremat.get_plan(planned)
    clock = on_clock(planned, lambda plan: 1.0 if plan.schedule != given.schedule else 2.0)
    tuning = tune(planned)
    trained, predicted = train_noting_plans(planned, batch, STEPS + 2)
    assert plain.differences(trained) == []
    assert trained.peaks == [each.predicted_peak for each in predicted]
    assert max(trained.peaks) <= given.memory_limit
    assert len(set(clock.ran)) == len(tuning.plans) > 2
    assert tuning.record.winner > 0
    assert predicted[-1] is predicted[-2]
    assert predicted[-1].schedule == tuning.plans[tuning.record.winner].schedule
    assert predicted[-1].tuning == tuning.record
    assert planned_call(planned).captures == 1
    if name == "mlp":  # from the winner on
        again = tune(planned)
        assert again.plans[0].schedule == predicted[-1].schedule
        trained, predicted = train_noting_plans(planned, batch, STEPS)
        assert trained.peaks == [each.predicted_peak for each in predicted]


def test_two_forwards_at_a_time_are_those_of_plain_training(on_clock):
    """Running statistics that the first has saved change in the second."""
    model, batch = small("convnet")
    plain = copy.deepcopy(model)
    planned = hybridremat.wrap(model, kwargs=batch, memory_limit="150%", forwards=2, **HOW)
    given = hybridremat.get_plan(planned)
    clock = on_clock(planned, lambda plan: 1.0 if plan.schedule != given.schedule else 2.0)
    tuning = tune(planned)
    for step in range(STEPS):
        for net in (plain, planned):
            torch.manual_seed(step)
            net.zero_grad()
            first, second = loss_in(net(**batch)), loss_in(net(**batch))
            first.backward()
            second.backward()
        grads = zip(plain.parameters(), planned.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in grads)
    assert tuning.done and len(set(clock.ran)) == len(tuning.plans) > 1


def test_twenty_steps_find_what_is_within_a_point_of_the_best_of_the_pool(on_clock):
    torch.manual_seed(0)
    model, batch = Mlp(layers=6), {"x": torch.randn(64, 32)}
    planned = hybridremat.wrap(model, kwargs=batch, memory_limit="70%", **HOW)
    call, plan = planned_call(planned), hybridremat.get_plan(planned)
    pool = candidates(plan, call.context, 8)
    for seed in range(100, 104):

        def seconds(plan, seed=seed):
            return schedule_time(with_wrong_times(plan.details.graph, seed), plan.schedule) / 1e9

        on_clock(planned, seconds)
        tuning = tune(planned, steps=20)
        train_on(planned, batch, 20)
        assert tuning.done
        graph = with_wrong_times(plan.details.graph, seed)
        point = 0.01 * schedule_time(graph, plain_schedule(graph)) / 1e9
        assert seconds(hybridremat.get_plan(planned)) <= min(map(seconds, pool)) + point


def test_schedules_that_take_turns_keep_the_limit_and_differ():
    planned, _ = wrapped()
    given = hybridremat.get_plan(planned)
    plans = candidates(given, planned_call(planned).context, 8)
    assert plans[0] is given
    assert len({each.schedule for each in plans}) == len(plans) > 2
    assert all(each.needed <= given.memory_limit for each in plans)
    assert all(each.overhead <= (1 + given.overhead) * 1.5 - 1 for each in plans)


def test_without_a_gain_nothing_changes(on_clock):
    planned, batch = wrapped()
    given = hybridremat.get_plan(planned)
    on_clock(planned, lambda _: 1.0)
    tuning = tune(planned)
    train_on(planned, batch, STEPS)
    assert tuning.record.winner == 0
    after = hybridremat.get_plan(planned)
    assert after == given
    assert after.tuning == tuning.record


def test_forwards_in_flight_are_one_step_and_those_without_backward_none(on_clock):
    planned, batch = wrapped("mlp", "100%", forwards=2)
    clock = on_clock(planned, lambda _: 1.0)
    tuning = tune(planned)
    assert not tuning.done
    schedules = []
    for _ in range(3):
        planned(**batch)  # its graph is gone at once
        schedules.append(hybridremat.get_plan(planned).schedule)
    first = loss_in(planned(**batch))
    schedules.append(hybridremat.get_plan(planned).schedule)
    second = loss_in(planned(**batch))
    schedules.append(hybridremat.get_plan(planned).schedule)
    first.backward()
    assert sum(map(len, tuning._halving.times)) == 0
    second.backward()
    assert len({*schedules}) == 1
    assert sum(map(len, tuning._halving.times)) == 1
    train_on(planned, batch, STEPS - 1)
    assert tuning.done
    assert len(clock.ran) == 2 * STEPS + 3


def test_a_forward_from_before_runs_its_own_backward_and_a_second_one_too(on_clock):
    plain, _ = small("convnet")
    planned, batch = wrapped("convnet")
    given = hybridremat.get_plan(planned)
    torch.manual_seed(3)
    early = loss_in(planned(**batch))
    on_clock(planned, lambda plan: 2.0 - (plan.schedule != given.schedule))
    tuning = tune(planned)
    early.backward(retain_graph=True)
    early.backward()
    torch.manual_seed(3)
    loss = loss_in(plain(**batch))
    loss.backward(retain_graph=True)
    loss.backward()
    grads = zip(planned.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in grads)
    for _ in range(STEPS):
        loss = loss_in(planned(**batch))
        loss.backward(retain_graph=True)
        loss.backward()  # not in its time
    assert tuning.done
    assert tuning.record.winner > 0


def test_a_tuned_plan_says_what_was_tried_and_its_file_runs_the_winner(on_clock, tmp_path):
    planned, batch = wrapped()
    tuning = tune(planned)
    assert "0 of 12 steps have run" in str(tuning)
    assert tuning.plan is tuning.plans[0]
    on_clock(planned, lambda _: 0.0)
    tuning._clock = RunsAs(planned, prefer(2)(tuning.plans))
    train_on(planned, batch, STEPS)
    plan = hybridremat.get_plan(planned)
    assert tuning.plan == plan
    assert "schedules took turns in 12 steps; the planned one gave way" in str(plan)
    assert "50.0% less time" in str(tuning)
    assert "1 s" in str(plan)
    plan.save(tmp_path / "plan.json")
    again = hybridremat.Plan.load(tmp_path / "plan.json")
    assert (again, again.tuning) == (plan, plan.tuning)
    model, batch = small("mlp")
    other = hybridremat.wrap(model, kwargs=batch, plan=again, progress=False)
    assert hybridremat.get_plan(other).schedule == tuning.plans[2].schedule
    second = tune(other)  # from a file: searched again
    train_on(other, batch, STEPS)
    assert second.done


def test_tuning_twice_goes_on_from_the_winner(on_clock):
    planned, batch = wrapped()
    for number in (1, 2):
        tuning = tune(planned)
        tuning._clock = RunsAs(planned, prefer(number)(tuning.plans))
        train_on(planned, batch, STEPS)
        assert hybridremat.get_plan(planned).schedule == tuning.plans[number].schedule
        peak = allocated_peak(lambda: train_on(planned, batch, 1))
        assert peak == hybridremat.get_plan(planned).predicted_peak


@pytest.mark.slow
def test_moves_take_turns_in_one_file(monkeypatch, tmp_path, on_clock):
    from hybridremat.sequence.offload.link import Link

    monkeypatch.setattr("hybridremat.planning.moving.NOMINAL", Link(1e12, 1e12, latency=0))
    model, batch = small("transformer")
    plain = train_plain(model, batch, steps=STEPS + 1)
    planned = hybridremat.wrap(model, kwargs=batch, memory_limit="80%", offload=f"file:{tmp_path}", **HOW)
    tuning = tune(planned)
    moves = [len(each.schedule.moves) for each in tuning.plans]
    assert len({*moves}) > 1
    most = max(range(len(moves)), key=lambda n: tuning.plans[n].host_bytes * (n > 0))
    tuning._clock = RunsAs(planned, prefer(most)(tuning.plans))
    trained, predicted = train_noting_plans(planned, batch, STEPS + 1)
    assert plain.differences(trained) == []
    assert trained.peaks == [each.predicted_peak for each in predicted]


def test_what_cannot_be_tuned_is_an_error_that_names_it():
    model, batch = small("mlp")
    with pytest.raises(hybridremat.ModelError, match="not wrapped"):
        tune(model)
    with pytest.raises(hybridremat.TuningError, match=r"torch\.compile"):
        tune(torch.compile(model, backend="eager"))
    planned, batch = wrapped()
    for wrong in (3, 0, 4.5, True, "20", None, 10**9):
        with pytest.raises(hybridremat.TuningError, match="give 4 to 10000"):
            tune(planned, wrong)
    tune(planned)
    assert len(repr(planned._compiled_call_impl.tuning)) < 1000
    with pytest.raises(hybridremat.TuningError, match=r"turns already.*call stop\(\)"):
        tune(planned)
    train_on(planned, batch, STEPS)
    tune(planned)


def test_steps_for_all_sizes_are_refused():
    model, batch = small("mlp")
    planned = hybridremat.wrap(model, kwargs=batch, memory_limit="100%", dynamic=True, **HOW)
    with pytest.raises(hybridremat.TuningError, match="dynamic=False"):
        tune(planned)


def test_steps_of_several_graphs_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    planned = hybridremat.wrap_each(model, "0", (torch.randn(4, 8),), memory_limit="100%", **HOW)
    with pytest.raises(hybridremat.TuningError, match="several graphs"):
        tune(planned)


def test_compiled_steps_are_refused(monkeypatch):
    planned, _ = wrapped()
    call = planned_call(planned)
    settings = call.context.settings
    monkeypatch.setattr(type(settings), "compiler", "inductor", raising=False)
    object.__setattr__(settings, "compiler", "inductor")
    with pytest.raises(hybridremat.TuningError, match="inductor"):
        tune(planned)


def test_a_step_whose_plan_leaves_no_choice_keeps_it(on_clock):
    planned, batch = wrapped("mlp", "100%")
    import hybridremat.planning.candidates as module

    module.WINDOW = -1.0
    tuning = tune(planned)
    assert tuning.done
    assert "it stays" in str(tuning)
    train_on(planned, batch, 1)
    assert hybridremat.get_plan(planned).tuning == tuning.record
    assert tuning._ranks is ALONE


@pytest.mark.slow
def test_all_ranks_run_the_same_and_keep_the_same(tmp_path):
    first, second = run_ranks("support.rank_cases:tuned", tmp_path)
    assert first["ran"] == second["ran"]
    assert len({*first["ran"]}) > 2
    assert first["plan"] == second["plan"]
    assert first["winner"] == second["winner"] == first["slowest rank's"]
    assert first["record"] == second["record"]
    assert first["different"] == second["different"] == []
    assert "different plans" in first["refused"][1] and "different plans" in second["refused"][1]


def test_what_took_turns_is_gone_with_the_step():
    planned, batch = wrapped()
    tune(planned)
    train_on(planned, batch, 3)
    graph = planned_call(planned).graph_of(hybridremat.get_plan(planned).fingerprint)
    step = weakref.ref(graph.step.module)
    turns = weakref.ref(graph.turns())
    del graph
    hybridremat.unwrap(planned)
    gc.collect()
    assert step() is None
    assert turns() is None


def test_a_comparison_that_cannot_end_can_be_stopped():
    planned, batch = wrapped()
    tuning = tune(planned)
    train_on(planned, batch, 1)
    tuning.stop()
    assert tuning.done and tuning.record.winner == 0
    train_on(planned, batch, 1)
    assert hybridremat.get_plan(planned).schedule == tuning.plans[0].schedule
    tuning.stop()
    assert not tune(planned).done or len(tuning.plans) == 1

"""What Dynamo compiled for a step that is gone is forgotten, and never while code is looked up."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.compiler.backend import Backend
from hybridremat.compiler.forgetting import forget_soon, nothing_forgotten
from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import JointGraph
from hybridremat.graph.private_dynamo import compile_lock, usual_stance
from support.broken_nets import HOW


def test_what_is_to_be_forgotten_waits_for_the_last_call_that_runs():
    done = []
    with nothing_forgotten():
        with nothing_forgotten():
            forget_soon(lambda: done.append("first"))
        assert done == []
        forget_soon(lambda: forget_soon(lambda: done.append("second")))
    assert sorted(done) == ["first", "second"]
    forget_soon(lambda: done.append("third"))
    assert done[-1] == "third"


def in_another_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_and_while_another_thread_compiles_for_the_end_of_a_later_call():
    done = []
    with compile_lock:
        in_another_thread(lambda: forget_soon(lambda: done.append("first")))
        assert done == []
        forget_soon(lambda: done.append("second"))  # of the thread that compiles
        assert sorted(done) == ["first", "second"]


@pytest.mark.parametrize("set_meanwhile", [None, "eager_on_recompile"])
def test_a_stance_is_back_when_the_last_of_two_threads_has_run(set_meanwhile):
    def stance():
        return torch._dynamo.eval_frame._stance.stance

    entered, leave = threading.Event(), threading.Event()

    def run():
        with usual_stance():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=run)
    with torch.compiler.set_stance("force_eager"):
        with usual_stance():
            thread.start()
            entered.wait()
            assert stance() == "default"
        assert stance() == "default"
        if set_meanwhile:
            torch.compiler.set_stance(set_meanwhile)
        leave.set()
        thread.join()
        assert stance() == (set_meanwhile or "force_eager")
    assert stance() == "default"


class Collecting(nn.Module):
    """Collects garbage between its graphs, where Dynamo is at work on its functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def inner(self, x):
        return self.second(x).relu()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        gc.collect()
        return self.inner(x).pow(2).mean()


class Plain(Collecting):
    """One graph."""

    def forward(self, x):
        return self.inner(self.first(x)).pow(2).mean()


@pytest.mark.parametrize("kind", [Plain, Collecting])
def test_a_refused_batch_holds_nothing(kind):
    model, x = kind(), torch.randn(4, 8)
    how = HOW if kind is Collecting else HOW | {"graph_breaks": "auto"}
    hybridremat.wrap(model, kwargs={"x": x}, memory_limit=10_000, **how)
    model(x).backward()
    gc.disable()
    try:
        for rows in (4000, 5000, 5000):
            large = torch.randn(rows, 8)
            gone = weakref.ref(large)
            with pytest.raises(InfeasibleLimitError):
                model(large)
            del large
            assert gone() is None
    finally:
        gc.enable()


def test_an_error_that_was_being_handled_keeps_its_variables():
    model, x = Plain(), torch.randn(4, 8)
    hybridremat.wrap(model, kwargs={"x": x}, memory_limit=10_000, **HOW | {"graph_breaks": "auto"})

    def fails():
        seen = "what a debugger looks at"
        raise ValueError(seen)

    try:
        fails()
    except ValueError as error:
        with pytest.raises(InfeasibleLimitError):
            model(torch.randn(4000, 8))
        assert "seen" in error.__traceback__.tb_next.tb_frame.f_locals


@pytest.mark.parametrize("kind", [Plain, Collecting])
@pytest.mark.parametrize("unwrapped", [False, True])
def test_what_was_captured_goes_with_its_model(kind, unwrapped):
    def there():
        for _ in range(3):  # finalizers make garbage of more
            gc.collect()
        return sum(type(each) in (Backend, JointGraph) for each in gc.get_objects())

    before, model = there(), kind()
    how = HOW if kind is Collecting else HOW | {"graph_breaks": "auto"}
    hybridremat.wrap(model, kwargs={"x": torch.randn(4, 8)}, memory_limit="100%", **how)
    for rows in (4, 6, 5):  # the second of them with symbols for sizes
        model(torch.randn(rows, 8)).backward()
    assert there() > before
    if unwrapped:
        hybridremat.unwrap(model)
    gone = weakref.ref(model)
    del model
    assert there() <= before
    assert gone() is None


def test_models_of_a_class_are_wrapped_again_while_earlier_ones_are_collected():
    x = torch.randn(4, 8)
    peaks = []
    for _ in range(4):
        model = Collecting()
        model.itself = [model]  # a cycle, which only a collection frees
        hybridremat.wrap(model, kwargs={"x": x}, memory_limit="100%", **HOW)
        model(x).backward()
        peaks.append(hybridremat.get_plan(model).predicted_peak)
    assert len(set(peaks)) == 1

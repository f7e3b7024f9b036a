"""Ctrl-C in the functions of the API, at any moment: it ends them, and the model can be used as before."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress

import pytest

from hybridremat.planning import step_costs
from support.training import small, train, train_plain
from support.wrapping import assert_untouched, state_of, wrap

MANY = """
import os, signal, sys, threading, time
import hybridremat
from support.training import small
from support.wrapping import wrap

moments = int(sys.argv[1])
wrap(*small("running"), "85%", cache=False)  # imports
started = time.perf_counter()
wrap(*small("running"), "85%", cache=False)
whole = time.perf_counter() - started
lost = []
for moment in range(moments):
    model, batch = small("running")
    sent = []
    def send():
        sent.append(1)
        os.kill(os.getpid(), signal.SIGINT)
    timer = threading.Timer(whole * (moment + 0.5) / moments * 0.8, send)
    timer.start()
    try:
        wrap(model, batch, "85%", cache=False)
    except KeyboardInterrupt:
        ended = True
    else:
        timer.cancel()
        ended = not sent  # over before
    if not ended:
        lost.append(moment)
    elif sent:
        wrap(model, batch, "100%", cache=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print("lost", lost)
"""


IMPORTING = """
import os, signal, sys
import torch
import hybridremat

class Interrupting:
    sent = 0

    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            self.sent += 1
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
how = {"memory_limit": "100%", "cost_model": "flops", "workers": 1, "progress": False, "cache": False}
try:
    hybridremat.wrap(model, (torch.ones(4, 8),), **how)
except KeyboardInterrupt:
    hybridremat.wrap(model, (torch.ones(4, 8),), **how)
    print("interrupted", sys.meta_path[0].sent)
"""


@pytest.mark.parametrize("module", ["sympy.functions", "torch._inductor.config", "hybridremat.planning"])
def test_modules_whose_import_was_interrupted_are_whole(module) -> None:
    command = [sys.executable, "-c", IMPORTING, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout == "interrupted 1\n", done.stderr[-3000:]


PRESSED = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from hybridremat.interrupts import prompt_interrupts, raise_if_interrupted

def press(times):
    time.sleep(0.1)
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.03)

@prompt_interrupts()
def call(then):
    try:
        import takes_half_a_second
        then()
    finally:
        time.sleep(0.3)
        print("cleaned up")

for then in (raise_if_interrupted, lambda: time.sleep(1)):
    sys.modules.pop("takes_half_a_second", None)
    threading.Thread(target=press, args=(8,)).start()
    try:
        call(then)
    except KeyboardInterrupt:
        time.sleep(0.5)
        print("once", signal.getsignal(signal.SIGINT) is signal.default_int_handler)

@prompt_interrupts(quiet=True)
def program():
    import takes_half_a_second

sys.modules.pop("takes_half_a_second", None)
threading.Thread(target=press, args=(1,)).start()
try:
    program()
except KeyboardInterrupt:
    print("in the import", "takes_half_a_second" not in sys.modules)

@prompt_interrupts()
def own():
    signal.signal(signal.SIGINT, signal.SIG_IGN)

own()
print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
"""


def test_many_interrupts_in_an_import_are_one(tmp_path) -> None:
    text = "import time\nend = time.time() + 0.5\nwhile time.time() < end:\n    sum(range(100))\n"
    (tmp_path / "takes_half_a_second.py").write_text(text)
    command = [sys.executable, "-c", PRESSED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    expected = [*["cleaned up", "once True"] * 2, "in the import True"]
    assert done.stdout.split("\n") == [*expected, "True", ""], done.stderr[-3000:]


@pytest.mark.parametrize("moments", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_every_interrupt_ends_wrap(moments) -> None:
    command = [sys.executable, "-c", "import sys; sys.path[:0] = ['tests']\n" + MANY, str(moments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout == "lost []\n", done.stderr[-3000:]


SLEPT_ON: list[int] = []


def in_weak_callback() -> None:
    class Thing:
        pass

    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    assert reference() is None
    time.sleep(5)  # the interrupt is sent again
    SLEPT_ON.append(1)


def in_except() -> None:
    with suppress(BaseException):  # as libraries do
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("swallowed", [in_weak_callback, in_except])
def test_an_interrupt_that_is_swallowed_ends_wrap(swallowed, monkeypatch) -> None:
    model, batch = small("running")
    before, costs = state_of(model), step_costs.with_costs
    with monkeypatch.context() as patch:
        patch.setattr(step_costs, "with_costs", lambda *args: (swallowed(), costs(*args))[1])
        with pytest.raises(KeyboardInterrupt):
            wrap(model, batch, "85%")
    assert not SLEPT_ON
    assert_untouched(before, model)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    wrap(model, batch, "100%")
    assert not train(model, batch, steps=2).differences(train_plain(*small("running"), steps=2))


def test_a_handler_of_the_callers_own_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGINT)
        wrap(*small("running"), "85%", on_infeasible="error")
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)

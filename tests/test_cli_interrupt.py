"""Ctrl-C at any time: one line, status 130, no file, no process left. Each case is a process of its own."""

import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from ortools.sat.python import cp_model

from hybridremat.blocks.pareto import enumerate_options
from hybridremat.blocks.types import BackwardStep, BlockProblem, Effort, ForwardOp
from support.command_line import MODELS, QUICK, alive, children, started

SLOW = """
from hybridremat.zoo.models import reference_model


def make():
    model = reference_model("gpt2")
    print("made", flush=True)
    return model
"""
PATIENCE = 120  # seconds; the machine may be busy


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A folder with a target that takes seconds to plan, and says when it is made."""
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def planning(*arguments: str):
    words = "slow.py:make", "--limit", "50%", "-o", "p.json", "-q"
    return started("plan", *words, *arguments, process_group=0)


def assert_ended(process, folder: Path) -> None:
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert not [path.name for path in folder.iterdir() if "p.json" in path.name]


@pytest.mark.parametrize(
    "delay", [0.3, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0.0, 0.9, 1.8))]
)
def test_while_the_model_is_captured(slow, delay):
    """Destructors and callbacks run all the time here, and swallow exceptions."""
    with planning("--workers", "1") as process:
        assert process.stdout.readline() == "made\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        assert_ended(process, slow)


@pytest.mark.parametrize(
    "everybody",
    [
        pytest.param(True, id="as a terminal does"),
        pytest.param(False, id="one process", marks=pytest.mark.slow),
    ],
)
def test_while_blocks_are_solved(slow, everybody):
    """A terminal sends the signal to the solver processes too: they must not write their tracebacks."""
    with planning("--cost-model", "flops", "--workers", "2", "--block-solver", "cp-sat") as process:
        assert process.stdout.readline() == "made\n"
        until = time.monotonic() + PATIENCE
        while not (solvers := children(process.pid)):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT) if everybody else process.send_signal(signal.SIGINT)
        assert_ended(process, slow)
    assert not [solver for solver in solvers if alive(solver)]


@pytest.mark.slow
def test_several_in_a_row_change_nothing(slow):
    with planning("--cost-model", "flops", "--workers", "2") as process:
        assert process.stdout.readline() == "made\n"
        for _ in range(5):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert_ended(process, slow)


@pytest.mark.slow
@pytest.mark.parametrize("swallow", ["__del__", "import", "except"])
def test_an_interrupt_that_is_swallowed_comes_again(slow, swallow):
    raising = "import signal\n        signal.raise_signal(signal.SIGINT)"
    if swallow == "__del__":
        code = f"class C:\n    def __del__(self):\n        {raising}\n\ndef make():\n    C()\n"
    elif swallow == "except":  # the program ends as interrupted all the same
        code = f"def make():\n    try:\n        {raising}\n    except BaseException:\n        pass\n"
        code += "    from mymodels import make\n    return make()\n\ndef rest():\n"
    else:  # as bindings in C++ do
        code = f"def make():\n    try:\n        {raising}\n    except BaseException as e:\n"
        code += "        raise ImportError('initialization failed') from e\n"
    (slow / "slow.py").write_text(code + "    import time\n    time.sleep(60)\n    print('slept')\n")
    with planning() as process:
        assert_ended(process, slow)


def test_the_solver_leaves_the_signal_to_the_program(monkeypatch):
    """CP-SAT would take Ctrl-C for a time limit: the program would go on with a poorer result."""
    seen = []
    solve = cp_model.CpSolver.solve

    def watched(self, *args, **kwargs):
        seen.append(self.parameters.catch_sigint_signal)
        return solve(self, *args, **kwargs)

    monkeypatch.setattr(cp_model.CpSolver, "solve", watched)
    ops = tuple(ForwardOp((c - 1,) if c else (), (c,), 3 + c, c % 2) for c in range(5))
    steps = tuple(BackwardStep((4 - j, 3 - j), 9 + j, 0, 5) for j in range(4))
    problem = BlockProblem((4, 3, 7, 2, 6), ops, steps, frozenset({4}), 6)
    assert enumerate_options(problem, Effort(solves=4, solo_solves=1, solved_above=0)).options
    assert set(seen) == {False}


@pytest.mark.slow
def test_the_bar_says_what_is_done_on_a_terminal_alone(slow):
    (slow / "slow.py").write_text(MODELS)
    words = ["plan", "slow.py:make", "--limit", "80%", "--no-cache", *QUICK]
    assert "solving blocks" in on_terminal(*words)
    assert on_terminal(*words, "--quiet") == ""
    with started(*words) as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert all(line.startswith("hybridremat: ") for line in err.splitlines()), "lines, and no bar"


def on_terminal(*arguments: str) -> str:
    """What a command writes to the standard error where that is a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hybridremat", *arguments]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    written = b""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        with suppress(OSError):  # the other end is closed
            while part := os.read(ours, 4096):
                written += part
    os.close(ours)
    assert process.returncode == 0
    return written.decode()

"""Solves in a thread of their own: the same answers, and an end at Ctrl-C."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
from ortools.sat.python import cp_model

from hybridremat.sequence.solving import solved


def knapsacks(count: int) -> cp_model.CpModel:
    """Many knapsacks over the same items: for hundreds of items far beyond any patience."""
    draw, model = random.Random(1), cp_model.CpModel()
    items = [model.new_bool_var("") for _ in range(count)]
    for _ in range(count):
        model.add(sum(draw.randint(1, 50) * item for item in draw.sample(items, 8)) <= 100)
    model.maximize(sum(draw.randint(1, 99) * item for item in items))
    return model


def solver_of(effort: float) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.catch_sigint_signal = False
    return solver


def test_the_answer_is_the_solvers_own() -> None:
    here, there = solver_of(1.0), solver_of(1.0)
    assert here.solve(knapsacks(10)) == solved(there, knapsacks(10)) == cp_model.OPTIMAL
    assert here.objective_value == there.objective_value


def test_an_error_of_the_solver_is_raised() -> None:
    with pytest.raises(AttributeError):
        solved(solver_of(1.0), None)  # type: ignore[arg-type]


def test_a_solve_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="max_deterministic_time"):
        solved(cp_model.CpSolver(), knapsacks(10))


def test_an_interrupt_ends_the_solve_and_its_thread() -> None:
    solver, model, threads = solver_of(100.0), knapsacks(400), threading.active_count()
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        solved(solver, model)
    timer.join(10)
    for thread in threading.enumerate():
        if thread.name == "cp-sat":
            thread.join(60)
    assert threading.active_count() == threads, threading.enumerate()

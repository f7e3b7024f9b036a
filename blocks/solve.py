"""Solve every distinct block of a chain once: small ones in this process, large ones in others beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from math import inf
from queue import SimpleQueue
from types import MappingProxyType
from typing import Final

from hybridremat.blocks.types import BlockProblem, BlockSolver, OptionSet
from hybridremat.blocks.worker import Worker, WorkerError
from hybridremat.graph.deadline import NO_DEADLINE, Deadline

Seconds = Mapping[BlockProblem, float]

LIGHT: Final = 12_000_000
"""Entries of one sweep of all blocks together: a second, where to start a process takes a quarter of one."""

SMALL: Final = LIGHT // 16
"""The same of one block that is solved in this process in any case."""


def solve_blocks(
    problems: Sequence[BlockProblem],
    *,
    workers: int | None = None,
    solver: BlockSolver = "auto",
    on_progress: Callable[[int, int], None] | None = None,
    deadline: Deadline = NO_DEADLINE,
    seconds: Seconds = MappingProxyType({}),
) -> dict[BlockProblem, OptionSet]:
    """Pareto sets of the distinct problems among ``problems``.

    Parameters
    ----------
    problems
        Blocks; equal ones are solved once.
    workers
        Processes; default: one for each processor that this process may use. With 1, and if no block takes
        long, everything runs here. The result is the same for any number.
    solver
        What solves them (:func:`~hybridremat.blocks.pareto.enumerate_options`).
    on_progress
        Called as ``on_progress(done, total)`` in the calling thread, first with ``done = 0``.
    deadline
        When to end without the blocks that are not solved yet.
    seconds
        Of a nominal core, for blocks that are not to take as long as they would
        (:mod:`~hybridremat.blocks.curtailed`).

    Returns
    -------
    dict
        Option set of every distinct problem, in order of first appearance; of those solved by the deadline.

    Raises
    ------
    ValueError
        If ``workers`` is below 1 or a block cannot run at all.
    GraphSizeError
        If a block is too large for the solver.
    """
    distinct = list(dict.fromkeys(problems))
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    # Largest first, so that no long solve starts when the others are done; with a deadline as many as can be.
    order = sorted(distinct, key=lambda p: -len(p.ops) * len(p.steps), reverse=bool(deadline))
    large = _large(order, solver, deadline, seconds) if workers != 1 or deadline else set()
    count = min(workers or _processors(), len(large))
    here = _solve_here([problem for problem in order if problem not in large], solver, seconds, deadline)
    there = [problem for problem in order if problem in large]
    solved: dict[BlockProblem, OptionSet] = {}
    if on_progress is not None:
        on_progress(0, len(order))
    if there:
        here = _solve_in_processes(there, here, solver, seconds, count, deadline)
    for problem, options in here:
        solved[problem] = options
        if on_progress is not None:
            on_progress(len(solved), len(order))
    return {problem: solved[problem] for problem in distinct if problem in solved}


def _large(
    problems: Sequence[BlockProblem], solver: BlockSolver, deadline: Deadline, seconds: Seconds
) -> set[BlockProblem]:
    """The blocks for other processes, which can be ended: none if starting some would take as long as all."""
    from hybridremat.blocks.curtailed import most_work
    from hybridremat.blocks.pareto import exact_work

    work = {
        problem: most_work(seconds[problem]) if problem in seconds else exact_work(problem, solver)
        for problem in problems
    }
    if sum(work.values()) <= LIGHT and not deadline:
        return set()
    return {problem for problem in problems if work[problem] > SMALL}


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _solve_here(
    order: Iterable[BlockProblem],
    solver: BlockSolver,
    seconds: Seconds,
    deadline: Deadline = NO_DEADLINE,
) -> Iterator[tuple[BlockProblem, OptionSet]]:
    from hybridremat.blocks.curtailed import options_within
    from hybridremat.blocks.scratch import Scratch

    scratch = Scratch()
    for problem in order:
        if deadline.passed:
            return
        yield problem, options_within(problem, seconds.get(problem, inf), solver, scratch)


def _solve_in_processes(
    order: Sequence[BlockProblem],
    here: Iterable[tuple[BlockProblem, OptionSet]],
    solver: BlockSolver,
    seconds: Seconds,
    count: int,
    deadline: Deadline,
) -> Iterator[tuple[BlockProblem, OptionSet]]:
    """One thread for each process, which waits for its answers; idle ones take the next problem.

    Meanwhile ``here`` is solved in this one.
    """
    with ExitStack() as stack:
        idle: SimpleQueue[Worker] = SimpleQueue()
        pool = stack.enter_context(ThreadPoolExecutor(count))
        for _ in range(count):
            idle.put(stack.enter_context(Worker()))

        def run(problem: BlockProblem) -> OptionSet:
            worker = idle.get_nowait()  # as many as threads
            try:
                return worker.solve(problem, solver, seconds.get(problem, inf))
            except WorkerError:
                if worker.closed:
                    raise
                # Where processes cannot be had, the answer is the same, only later.
                return dict(_solve_here([problem], solver, seconds))[problem]
            finally:
                idle.put(worker)

        futures = {pool.submit(run, problem): problem for problem in order}
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        yield from here
        try:
            for future in as_completed(futures, deadline.left if deadline else None):
                yield futures[future], future.result()
        except TimeoutError:  # the processes end with the stack
            return

"""The largest batch that fits a memory limit, by secant search: each batch tried is a capture and a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Unpack

from hybridremat.analysis.batch_size import BatchSize
from hybridremat.analysis.batch_steps import Batches, Factory
from hybridremat.errors import InfeasibleLimitError, LimitError, TargetError
from hybridremat.interrupts import prompt_interrupts
from hybridremat.planning.settings import BatchSettings, settings_of
from hybridremat.units import format_bytes, is_count

GROWTH = 32  # a secant may reach this many times the largest batch that fits
PATIENCE = 3  # steps that may fail to halve the bracket before it is bisected


@prompt_interrupts()
def max_batch_size(
    model_factory: Factory,
    memory_limit: int | str,
    *,
    start: int = 1,
    most: int = 65536,
    progress: bool = True,
    **settings: Unpack[BatchSettings],
) -> BatchSize:
    """The largest batch whose training step fits a memory limit, and what that costs in time.

    Parameters
    ----------
    model_factory
        Called with a batch size; returns ``(model, kwargs)`` or ``(model, args, kwargs)``, what one training
        step of that batch passes. It is called once for each batch that is tried, some five in all; from the
        second one on, steps that differ in sizes alone are traced from one capture (``dynamic=False``: each
        is captured by itself).
    memory_limit
        Bytes of step memory, or a size (``"6GiB"``). Inputs, which grow with the batch, are not part of it.
    start
        Tried first: a guess that fits, if you have one.
    most
        The largest batch to try.
    progress
        Whether to show a progress bar on a terminal.
    **settings
        As of :func:`hybridremat.wrap`: ``max_overhead`` (against the plain step of the same batch),
        ``reserve``, ``forwards``, ``cost_model``, ``hold_outputs``, ``grad_outputs``, ``workers``, ``cache``,
        ``policy``, ``compiler``; ``device_spec`` as of :func:`hybridremat.plan`.

    Raises
    ------
    InfeasibleLimitError
        If batch 1 does not fit; ``least`` is what it needs.
    LimitError
        If the limit, ``start`` or ``most`` cannot be used.
    TargetError
        If the factory is not callable, or returns something else.
    ModelError, InputError, CaptureError
        As :func:`hybridremat.wrap`.

    Notes
    -----
    A batch fits by a real plan, and the next one is refused only after its blocks were solved for it. Steps
    are taken to need more with each sample; where one needs less than a smaller one, as kernels with other
    algorithms may, the result is one end of the batches that fit.

    Examples
    --------
    ``make(batch)`` returns a model and its inputs.

    >>> found = hybridremat.max_batch_size(make, "1MiB", cost_model="flops", progress=False)
    >>> found.batch_size > found.plain_batch_size
    True
    """
    _validate(model_factory, memory_limit, start, most)
    asked = settings_of("max_batch_size", BatchSettings.__optional_keys__, settings)
    asked = replace(asked, memory_limit=memory_limit).validated(need_limit=True)
    return largest_batch(Batches(model_factory, asked, show=progress), start=start, most=most)


def largest_batch(batches: Batches, *, start: int, most: int) -> BatchSize:
    """The largest of the batches that fits their limit.

    Raises
    ------
    InfeasibleLimitError
        If batch 1 does not fit.
    """
    guess = {0: batches.constant(start)}
    found = largest_fitting(batches.need, batches.limit, known=guess, start=start, most=most)
    if found == 0:
        raise _infeasible(batches)
    known = {n: batches.plain_need(n) for n, _, _ in batches.tried()}
    plain = largest_fitting(batches.plain_need, batches.limit, known=guess | known, start=1, most=found)
    plan = batches.plan(found)
    return BatchSize(
        batch_size=found,
        memory_limit=batches.limit,
        plan=plan,
        plain_batch_size=plain,
        overhead=plan.overhead,
        per_sample=_per_sample(batches, found, plan.overhead, plain),
        tried=batches.tried(),
        reached_most=found == most,
    )


def _validate(model_factory: Factory, memory_limit: int | str, start: int, most: int) -> None:
    if not callable(model_factory):
        raise TargetError(
            f"model_factory is a {type(model_factory).__name__}: give a function that takes a batch size and "
            "returns (model, kwargs) or (model, args, kwargs)"
        )
    if isinstance(memory_limit, str) and "%" in memory_limit:
        raise LimitError(
            f"memory_limit={memory_limit!r} is a share of the plain step's memory, which grows with the "
            'batch: give bytes (6442450944) or a size ("6GiB")'
        )
    for name, size in (("start", start), ("most", most)):
        if not is_count(size):
            raise LimitError(f"{name}={size!r} is out of range: give a batch size ≥ 1")
    if start > most:
        raise LimitError(f"start={start} is beyond most={most}: give a start of at most that, or raise most")


def _infeasible(batches: Batches) -> InfeasibleLimitError:
    (one,) = (tried for tried in batches.tried() if tried.batch == 1)
    assert one.least_peak is not None
    within = batches.settings.overhead_limit()
    kept = "" if within is None else f" with no more than {within:.1%} extra time"
    return InfeasibleLimitError(
        f"no batch fits memory_limit {format_bytes(batches.limit)} ({batches.limit} bytes): batch 1 needs "
        f"{format_bytes(one.least_peak)} ({one.least_peak} bytes) at least{kept}, and "
        f"{format_bytes(one.plain_peak)} without a plan. Raise the limit, or make the samples smaller.",
        limit=batches.limit,
        least=one.least_peak,
    )


def _per_sample(batches: Batches, found: int, overhead: float, plain: int) -> float | None:
    """Extra time a sample, as a fraction, against the plain step at its own largest batch."""
    alone = batches.plain_time(plain) if plain else 0
    if not alone:
        return None
    planned = batches.plain_time(found) * (1 + overhead)
    return planned / found / (alone / plain) - 1.0


def largest_fitting(
    need: Callable[[int], int], limit: int, *, known: Mapping[int, int], start: int, most: int
) -> int:
    """The largest n from 0 to ``most`` that fits, or one whose successor does not if needs do not rise.

    Parameters
    ----------
    need
        Bytes that n needs. Called once for each n, and always for the result and its successor, unless they
        are known, 0 or beyond ``most``.
    limit
        Bytes: n fits if it needs no more.
    known
        Needs that are known already. That of 0 may be a guess at the constant part; 0 always fits.
    start
        Tried first if no need but that of 0 is known.
    """
    answers = dict(known)
    low = max((n for n, size in answers.items() if size <= limit), default=0)
    high = min((n for n, size in answers.items() if size > limit and n > low), default=most + 1)
    low = min(low, most)
    guess = min(start, most) if set(answers) <= {0} else _guess(answers, limit, low, high, most)
    stalled, width = 0, high - low
    while high - low > 1:
        answers[guess] = need(guess)
        stalled += 1
        if answers[guess] > limit:
            high = guess
        else:
            stalled = 0 if high > most and guess >= 2 * low else stalled  # still growing
            low = guess
        if 2 * (high - low) <= width and high <= most:
            stalled, width = 0, high - low
        guess = _guess(answers, limit, low, high, most)
        if stalled >= PATIENCE:
            guess = (low + high) // 2 if high <= most else min(most, max(guess, low + 4**stalled))
    return low


def _guess(answers: Mapping[int, int], limit: int, low: int, high: int, most: int) -> int:
    """The n at which the secant through the two nearest answers meets the limit, inside the bracket."""
    below = sorted(n for n in answers if n <= low)
    if high <= most:
        first, second = below[-1] if below else 0, high
    else:
        first, second = (below[-2], below[-1]) if len(below) > 1 else (0, low)
    rise = answers.get(second, limit) - answers.get(first, 0)
    if second <= first or rise <= 0:
        meets = high - 1
    else:
        meets = first + (limit - answers.get(first, 0)) * (second - first) // rise
    return max(low + 1, min(meets, high - 1, GROWTH * max(1, low)))

"""The answer of :func:`hybridremat.fit` in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hybridremat.analysis.fit_data import FitData
from hybridremat.units import format_bytes, format_share_up


def fit_text(fit: FitData) -> str:
    """Both formulas, then the limit to set, or what to do; the largest batch if it was looked for."""
    return "\n".join([*fit_sums(fit), *fit_verdict(fit), *_largest(fit)])


def fit_sums(fit: FitData) -> Iterator[str]:
    """What is added up, without a plan and with the one of least memory."""
    yield f"without a plan: {fit.formula(fit.plain_step, margin=fit.margin, memory=fit.memory)}"
    yield f"at the least: {fit.formula(fit.least_step, margin=fit.margin, memory=fit.memory)}"
    if fit.reserve:
        yield f"of the step {format_bytes(fit.reserve)} are reserve, for your own code"


def fit_verdict(fit: FitData, helps: Iterable[str] | None = None) -> Iterator[str]:
    """Whether it fits, and the limit to set, or what ``helps``; None: what helps on one device."""
    left = f"{format_bytes(max(0, fit.room))} are left for the step on {fit.device}"
    reserve = f", reserve={fit.reserve}" if fit.reserve else ""
    if fit.fits == "plain":
        yield f"it fits without a plan: {left}; memory_limit={fit.memory_limit}{reserve} keeps it so"
    elif fit.plan is not None:
        share = format_share_up(fit.plan.needed, fit.plain_step)
        yield (
            f"it fits with a plan: {left}, so set memory_limit={fit.memory_limit}{reserve} "
            f"({share} of the plain step, {fit.plan.overhead:+.1%} time by cost model {fit.plan.cost_model})"
        )
    else:
        short = fit.above(fit.least_step) + fit.margin + fit.resident - fit.memory
        yield f"it does not fit: {left}, {format_bytes(max(1, short))} too few for the plan of least memory"
        yield f"what helps: {'; '.join(_help(fit, short) if helps is None else helps)}"


def _help(fit: FitData, short: int) -> Iterator[str]:
    """What would make it smaller, by what is in the way."""
    if fit.gradients + fit.optimizer_step > fit.least_step and not fit.early_gradients and fit.optimizer_step:
        yield (
            f"foreach=False or fused=True in the optimizer, whose own step takes "
            f"{format_bytes(fit.optimizer_step)}"
        )
    if fit.gradients and not fit.early_gradients:
        yield (
            f'gradients="in_backward" (hybridremat.optimizer_in_backward), which spares most of '
            f"{format_bytes(fit.gradients)} of gradients"
        )
    if fit.optimizer_state > short > 0:
        yield f"an optimizer with less state than {format_bytes(fit.optimizer_state)}"
    elif fit.parameters + fit.optimizer_state > fit.memory // 2:
        yield "fewer trained parameters (LoRA), or sharding them over several devices (FSDP)"
    if fit.least_step > fit.gradients:
        yield "a smaller batch or shorter inputs"
    yield "a device with more memory"


def _largest(fit: FitData) -> Iterator[str]:
    if (found := fit.largest) is None:
        return
    most = " or more" if found.reached_most else ""
    yield (
        f"the largest batch is {found.batch_size}{most} ({found.overhead:+.1%} time of that step), "
        f"without a plan {found.plain_batch_size}"
    )

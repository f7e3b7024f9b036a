"""The answer of :func:`hybridremat.fit` for several devices in words."""

from __future__ import annotations

from collections.abc import Iterator

from hybridremat.analysis.fit_sharded_data import OnDevices, ShardedFitData
from hybridremat.analysis.fit_text import fit_sums, fit_verdict
from hybridremat.units import format_bytes, format_time

_HEAD = ("devices", "stays", "plain step", "least step", "left for it", "sent a step", "on the link", "fits")


def sharded_text(fit: ShardedFitData) -> str:
    """Both formulas of one rank, the limit to set, a table over devices, and what collectives send."""
    return "\n".join([*_first(fit), *fit_sums(fit), *_answer(fit), *_table(fit), *_sending(fit)])


def _first(fit: ShardedFitData) -> Iterator[str]:
    if fit.shard == "fsdp2":
        how, batch = f"fully_shard of {', '.join(fit.units)} and of the model", "that of one rank"
    else:
        how, batch = "tensor parallel by the model's own plan", "the same on all"
    yield f"one of {fit.gpus} ranks, {how}; the batch is {batch}"


def _answer(fit: ShardedFitData) -> Iterator[str]:
    yield from fit_verdict(fit, _help(fit))
    least = fit.least_gpus
    if least is None:
        yield "it fits on none of these numbers of devices"
    elif least != fit.gpus:
        yield f"{least} {'device is' if least == 1 else 'devices are'} the fewest of these on which it fits"


def _help(fit: ShardedFitData) -> Iterator[str]:
    yield "more devices"
    if fit.gradients + fit.optimizer_step > fit.least_step and fit.optimizer_step:
        yield (
            f"foreach=False or fused=True in the optimizer, whose own step takes "
            f"{format_bytes(fit.optimizer_step)}"
        )
    yield "a smaller batch or shorter inputs"
    yield "devices with more memory"


def _table(fit: ShardedFitData) -> Iterator[str]:
    rows = [_HEAD, *map(_row, fit.table)]
    places = [n for n in range(len(_HEAD)) if fit.link is not None or _HEAD[n] != "on the link"]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEAD))]
    for row in rows:
        yield "  ".join(row[place].rjust(widths[place]) for place in places)


def _row(row: OnDevices) -> tuple[str, ...]:
    verdict = {"plain": "yes", "no": "no", "planned": "planned"}[row.fits]
    return (
        str(row.gpus),
        format_bytes(row.resident),
        format_bytes(row.plain_step),
        format_bytes(row.least_step),
        format_bytes(max(0, row.room)),
        format_bytes(row.sent),
        "" if row.sending_time is None else format_time(row.sending_time),
        verdict if row.overhead is None else f"with {row.overhead:+.1%}",
    )


def _sending(fit: ShardedFitData) -> Iterator[str]:
    if fit.link is None:
        yield "how fast devices send to each other is not known: --link gives bytes in a second"
        return
    yield (
        f"on the link: bytes over {fit.link / 1e9:g} GB/s, as if nothing else ran meanwhile, beside "
        f"{format_time(fit.step_time)} of kernels in a plain step; on paper, nothing of it was measured"
    )

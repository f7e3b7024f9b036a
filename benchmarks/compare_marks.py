"""Print the frontiers of the eight reference models beside the recorded ones.

    python benchmarks/compare_marks.py [MODEL …]

Extra flops in percent (cost model ``flops``) at a share of plain eager training's recorded peak; one thread,
as the recorded figures were made. The last columns are the least peak and the place where ours is most above
it of the frontier with ``rewrites="none"``, and the least peaks where the loss alone is returned, with
gradients at the end and in the backward. Exits with 1 if a frontier is more than one point above its record,
or two above the one without rewrites.
"""

from __future__ import annotations

import sys
import time

import torch
from marks import Mark, compare, extra_at, per_layer_checkpoint, recorded_frontier, recorded_models
from rich.console import Console
from rich.table import Table

import hybridremat
from hybridremat.zoo.models import reference_model

SHARES = (70, 60, 55, 50, 45, 40, 35, 30, 25)


def _cell(ours: float | None, theirs: float | None) -> str:
    return " / ".join("–" if extra is None else f"{extra:.1f}" for extra in (ours, theirs))


def _most_above(found: hybridremat.Frontier, other: hybridremat.Frontier, eager: int) -> tuple[float, float]:
    """Points of extra flops by which a frontier is above another at the most, and at what share of eager."""
    return max(
        (100 * (found.at(memory_limit=point.peak).extra_flops - point.extra_flops), 100 * point.peak / eager)
        for point in other.points
        if point.peak >= found.least.peak
    )


def main(names: list[str]) -> int:
    """Plan each model and print its row."""
    torch.set_num_threads(1)
    table = Table(title="extra flops %, ours / recorded, at a share of plain eager peak")
    shares = [f"{share} %" for share in SHARES]
    titles = ("model", *shares, "least %", "worst", "per-layer", "seconds")
    for title in (*titles, "no rewrites: least %", "worst beside it", "loss alone: least %", "in backward"):
        table.add_column(title, justify="right")
    failed = False
    for name in names or recorded_models():
        base, _, dropout = name.partition("_")
        model, batch = reference_model(base, float(dropout or 0))
        eager, recorded = recorded_frontier(name)
        started = time.perf_counter()
        curve = hybridremat.frontier(model, kwargs=batch, cost_model="flops")
        seconds = time.perf_counter() - started
        points = [Mark(100 * p.peak / eager, 100 * p.extra_flops) for p in curve.points]
        result = compare(points, recorded)
        layers = [f"{extra_at(points, mark.peak):.1f}<{mark.extra}" for mark in per_layer_checkpoint(name)]
        cells = [_cell(extra_at(points, share), extra_at(recorded, share)) for share in SHARES]
        least = f"{result.least:.2f} / {result.recorded_least:.2f}"
        worst = f"{result.worst:+.2f} at {result.at:.1f}"
        plain = hybridremat.frontier(model, kwargs=batch, cost_model="flops", rewrites="none")
        above, share = _most_above(curve, plain, eager)
        others = [f"{100 * plain.least.peak / eager:.2f}", f"{above:+.2f} at {share:.1f}"]
        for when in ("at_end", "in_backward"):
            alone = hybridremat.frontier(
                model, kwargs=batch, cost_model="flops", outputs="loss", gradients=when
            )
            others.append(f"{100 * alone.least.peak / eager:.2f}")
        table.add_row(name, *cells, least, worst, " ".join(layers), f"{seconds:.1f}", *others)
        failed |= result.worst > 1 or result.least > result.recorded_least + 1 or above > 2
        Console(stderr=True).print(f"{name}: worst {worst}, least {least}, {seconds:.1f} s")
    Console(width=200).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``F.linear_cross_entropy`` in place of a language model's loss, plain and planned, beside ours by chunks.

    python benchmarks/fused_losses.py [MODEL …] [--pages]

Built-in language models whose loss is the product with a head and a cross entropy: the peak of a plain step
that returns its loss alone, the same with PyTorch's fused loss (torch ≥ 2.13; planned by us it has to keep
its graph, ``allow_retain_graph=True``), and ours with ``rewrites="chunked"``. Bytes, extra flops of the least
plans in percent, errors of gradients from float64's beside eager's. Rows go to ``data/fused_losses.csv`` as
they come, what is missing without MODEL, and those of MODEL anew; the table from them to docs/benchmarks.md;
``--pages`` does only that.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from generated import Row, circumstances, days, gone_on, loads, task_options, versions, write_part
from marks import DATA
from peers_child import distance, gradients
from reference import PAGE, title
from stock_inductor import subject
from torch import Tensor, nn
from torch.nn import functional

import hybridremat

SCRIPT: Final = "fused_losses.py"
ROWS: Final = DATA / "fused_losses.csv"
WAYS: Final = ("chunked", "exact", "fused")
COLUMNS: Final = (
    *("model", "plain", "fused", "fused_error"),
    *(f"{way}_{figure}" for way in WAYS for figure in ("fastest", "least", "extra", "there", "there_extra")),
    *("load", "date", "torch"),
)
HOW: Final[dict[str, Any]] = {"cost_model": "flops", "workers": 1, "progress": False}
MODELS: Final = ("gpt2", "llama")

HIDDEN: Final[dict[str, Callable[..., Any]]] = {
    "GPT2LMHeadModel": lambda model, tokens: model.transformer(input_ids=tokens),
    "LlamaForCausalLM": lambda model, tokens: model.model(input_ids=tokens, use_cache=False),
}
"""What stands before the head, by the class of the model."""


def loss_alone(model: nn.Module) -> None:
    """Make a model return its loss and nothing else."""
    run = model.forward
    model.forward = lambda **batch: run(**batch).loss  # type: ignore[method-assign]


def fused(model: nn.Module, *, planned: bool) -> None:
    """Make a model return its loss by ``F.linear_cross_entropy``; ``planned``: so that a planner takes it."""
    options = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=planned)
    run = partial(HIDDEN[type(model).__name__], model)

    def forward(input_ids: Tensor, labels: Tensor, **_: Any) -> Tensor:
        hidden = run(input_ids).last_hidden_state
        rows = hidden[:, :-1].flatten(0, 1)
        head: Tensor = model.lm_head.weight  # type: ignore[assignment, union-attr]
        return functional.linear_cross_entropy(rows, head, labels[:, 1:].flatten(), options=options)

    model.forward = forward  # type: ignore[method-assign]


def measured(name: str) -> list[Row]:
    """The row of one model, made in this process."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*linear_cross_entropy.*")
    load = os.getloadavg()[0]
    return [{"model": name, **figures(name), **circumstances(load)}]


def figures(name: str) -> Row:
    """The figures of one model: bytes, percents of extra flops, and errors."""
    plain, batch = subject(name)
    loss_alone(plain)
    model, _ = subject(name)
    fused(model, planned=False)
    own, _ = subject(name)
    fused(own, planned=True)
    given = {"kwargs": batch, **HOW}
    found: Row = {}
    found["plain"] = hybridremat.measure(plain, kwargs=batch, repeats=1).peak
    found["fused"] = hybridremat.measure(model, kwargs=batch, repeats=1).peak
    eager, theirs = gradients(plain, batch), gradients(model, batch)
    doubled, _ = subject(name)
    loss_alone(doubled.double())
    exact = gradients(doubled, batch)
    found["fused_error"] = round(distance(theirs, exact) / distance(eager, exact), 2)
    ways = {"chunked": (plain, {"rewrites": "chunked"}), "exact": (plain, {}), "fused": (own, {})}
    for way, (each, how) in ways.items():
        points = hybridremat.frontier(each, **given, **how)
        least = points.least
        fastest = min(points.points, key=lambda point: (point.overhead, point.peak))
        found[f"{way}_fastest"] = fastest.peak
        found[f"{way}_least"], found[f"{way}_extra"] = least.peak, round(100 * least.extra_flops, 2)
        if points.least.peak <= found["fused"]:
            at = points.at(memory_limit=found["fused"])
            found[f"{way}_there"], found[f"{way}_there_extra"] = at.peak, round(100 * at.extra_flops, 2)
    return found


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *table(rows)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the table."""
    return (
        "PyTorch has a fused loss of its own since 2.13, `F.linear_cross_entropy` with "
        f"`LinearCrossEntropyOptions`. `python benchmarks/fused_losses.py`: {days(rows)}, {versions(rows)}, "
        f"one thread, 2 cores with {loads(rows)}, cost model `flops`, loss alone, bytes. *Plain* and *fused* "
        "are measured. Planned are the fastest plan, and the one of least memory, of the model with the "
        "fused loss (`allow_retain_graph=True`, without which it cannot be planned), and of the loss as the "
        'model writes it, by chunks (`rewrites="chunked"`).'
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    yield "| model | plain | fused | fused / plain | fastest, fused | by chunks | least, fused | by chunks |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        sizes = ("plain", "fused", "fused_fastest", "chunked_fastest", "fused_least", "chunked_least")
        cells = [f"{int(row[each]):,}" for each in sizes]
        cells.insert(2, f"{100 * int(row['fused']) / int(row['plain']):.1f} %")
        yield f"| {' | '.join((title(row['model']), *cells))} |"


def main() -> None:
    """Measure what is asked for, write the page."""
    options = task_options(__doc__, MODELS)
    if options.here:
        print(json.dumps(measured(*options.here)))
        return
    tasks = [(name,) for name in options.names]
    write_part(PAGE, SCRIPT, part(gone_on(__file__, ROWS, COLUMNS, tasks, again=options.again)))


if __name__ == "__main__":
    main()

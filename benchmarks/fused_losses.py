"""``F.linear_cross_entropy`` in place of a language model's loss, plain and planned, beside ours by chunks.

    python benchmarks/fused_losses.py [MODEL …]

prints JSON rows of built-in language models whose loss is the product with a head and a cross entropy: the
peak of a plain step that returns its loss alone, the same with PyTorch's fused loss (torch ≥ 2.13; planned by
us it has to keep its graph, ``allow_retain_graph=True``), and ours with ``rewrites="chunked"``. Bytes, extra
flops of the least plans in percent, errors of gradients from float64's beside eager's.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from peers_child import distance, gradients
from stock_inductor import subject
from torch import Tensor, nn
from torch.nn import functional

import hybridremat

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


def row(name: str) -> Mapping[str, Any]:
    """The figures of one model."""
    plain, batch = subject(name)
    loss_alone(plain)
    model, _ = subject(name)
    fused(model, planned=False)
    own, _ = subject(name)
    fused(own, planned=True)
    given = {"kwargs": batch, **HOW}
    found: dict[str, Any] = {"model": name, "torch": torch.__version__}
    found["plain"] = hybridremat.measure(plain, kwargs=batch, repeats=1).peak
    found["fused"] = hybridremat.measure(model, kwargs=batch, repeats=1).peak
    eager, theirs = gradients(plain, batch), gradients(model, batch)
    doubled, _ = subject(name)
    loss_alone(doubled.double())
    exact = gradients(doubled, batch)
    found["fused_error"] = round(distance(theirs, exact) / distance(eager, exact), 2)
    ways = {"chunked": (plain, {"rewrites": "chunked"}), "exact": (plain, {}), "fused": (own, {})}
    for title, (each, how) in ways.items():
        points = hybridremat.frontier(each, **given, **how)
        least = points.least
        fastest = min(points.points, key=lambda point: (point.overhead, point.peak))
        found[f"{title}_fastest"] = fastest.peak
        found[f"{title}_least"], found[f"{title}_extra"] = least.peak, round(100 * least.extra_flops, 2)
        if points.least.peak <= found["fused"]:
            at = points.at(memory_limit=found["fused"])
            found[f"{title}_there"], found[f"{title}_there_extra"] = at.peak, round(100 * at.extra_flops, 2)
    return found


def main(names: list[str]) -> None:
    """Print a row for each model."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*linear_cross_entropy.*")
    for name in names or MODELS:
        print(json.dumps(row(name)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

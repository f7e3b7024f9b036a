"""Losses by chunks of rows beside plain PyTorch: peaks, times, and how near gradients are to float64.

    python benchmarks/chunked.py [NAME …]

NAME is one of :data:`CASES`. Peaks of a step in MiB: plain PyTorch's, measured; of the fastest and the
leanest plan with ``rewrites="chunked"``, and of the leanest with ``"exact"``. Times in pairs, beside plain
PyTorch. "Error" is the most, over parameters, that a gradient is farther from a float64 run's than the plain
one is.
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hybridremat
from hybridremat.graph.costs.allocations import peaks_of

PAIRS = 5
BATCH, LENGTH = 2, 256
_SHARED = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = _SHARED | {"num_key_value_heads": 2, "use_cache": False}


class Case(NamedTuple):
    """A model, its settings, and what it computes in: ``float32``, ``bfloat16`` or ``autocast``."""

    model: str
    settings: Mapping[str, Any]
    kind: str


CASES = {
    "llama-32k": Case("Llama", _LLAMA | {"vocab_size": 32_000}, "float32"),
    "llama-128k": Case("Llama", _LLAMA | {"vocab_size": 128_256}, "autocast"),
    "llama-bf16": Case("Llama", _LLAMA | {"vocab_size": 32_000}, "bfloat16"),
    "gemma2-capped": Case(
        "Gemma2", _LLAMA | {"vocab_size": 32_000, "head_dim": 32, "final_logit_softcapping": 30.0}, "autocast"
    ),
    "granite-scaled": Case("Granite", _LLAMA | {"vocab_size": 49_152, "logits_scaling": 8.0}, "autocast"),
}


class LossAlone(nn.Module):
    """Returns the loss of a causal language model."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = getattr(transformers, f"{case.model}Config")(**case.settings)
        self.model = getattr(transformers, f"{case.model}ForCausalLM")(config)
        self.autocast = case.kind == "autocast"
        self.to(torch.bfloat16 if case.kind == "bfloat16" else torch.float32).train()

    def forward(self, **batch: Tensor) -> Tensor:
        """The loss, a scalar."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(**batch).loss
        return loss


def _gradients(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch).backward()
    found = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _error(found: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest ratio of errors, of gradients whose plain error is more than rounding of the last bit."""
    ratios = []
    for name, right in exact.items():
        error, plain_error = (float((each[name] - right).norm()) for each in (found, plain))
        if plain_error > 1e-9 * float(right.norm()):
            ratios.append(error / plain_error)
    return max(ratios)


def _pairs(one: Callable[[], None], other: Callable[[], None]) -> float:
    """Median ratio of the time of one to that of the other, each after the other."""
    ratios = []
    for _ in range(PAIRS):
        seconds = []
        for run in (one, other):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def row(name: str) -> list[str]:
    """The cells of one case."""
    model = LossAlone(CASES[name])
    vocabulary = CASES[name].settings["vocab_size"]
    tokens = torch.randint(0, vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    exact_model = copy.deepcopy(model).double()
    exact_model.autocast = False
    exact = _gradients(exact_model, batch)
    del exact_model
    plain_model = copy.deepcopy(model)
    plain = _gradients(plain_model, batch)
    gc.collect()
    ((peak, _),) = peaks_of([lambda: lambda: plain_model(**batch).backward()], "cpu")
    how = {"kwargs": batch, "progress": False}
    chunked = hybridremat.frontier(model, rewrites="chunked", **how)
    least = hybridremat.frontier(model, **how).least.peak
    fastest = min(chunked.points, key=lambda point: (point.overhead, point.peak))
    hybridremat.wrap(model, memory_limit=fastest.peak, rewrites="chunked", **how)
    error = _error(_gradients(model, batch), plain, exact)
    ratio = _pairs(lambda: model(**batch).backward(), lambda: plain_model(**batch).backward())
    mebibytes = [f"{each / 2**20:.0f}" for each in (peak, fastest.peak, chunked.least.peak, least)]
    logits = f"{BATCH * LENGTH * vocabulary * 4 / 2**20:.0f}"
    return [name, CASES[name].kind, logits, *mebibytes, f"{ratio:.2f}", f"{error:.2f}"]


def main(names: list[str]) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table(title=f"{BATCH} × {LENGTH} tokens, torch {torch.__version__}")
    peaks = ("logits", "plain", "chunked, fastest", "chunked, least", "exact, least")
    for title in ("case", "computes in", *peaks, "time / plain", "error / plain"):
        table.add_column(title, justify="right")
    for name in names or CASES:
        table.add_row(*row(name))
    Console(width=160).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])

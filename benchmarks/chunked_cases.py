"""Language models with large vocabularies, their losses by chunks: peaks, times, nearness to float64."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
import transformers
from generated import Row
from torch import Tensor, nn

import hybridremat
from hybridremat.graph.costs.allocations import peaks_of

PAIRS: Final = 5
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
    """Median ratio of the CPU time of one to that of the other, each after the other."""
    ratios = []
    for _ in range(PAIRS):
        seconds = []
        for run in (one, other):
            started = time.process_time()
            run()
            seconds.append(time.process_time() - started)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def of_case(name: str) -> Row:
    """Of a language model with a large vocabulary: peaks in bytes, time and error as ratios to plain."""
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
    how: dict[str, Any] = {"kwargs": batch, "progress": False}
    chunked = hybridremat.frontier(model, rewrites="chunked", **how)
    least = hybridremat.frontier(model, **how).least.peak
    fastest = min(chunked.points, key=lambda point: (point.overhead, point.peak))
    hybridremat.wrap(model, memory_limit=fastest.peak, rewrites="chunked", **how)
    error = _error(_gradients(model, batch), plain, exact)
    ratio = _pairs(lambda: model(**batch).backward(), lambda: plain_model(**batch).backward())
    peaks = {"plain": peak, "fastest": fastest.peak, "least": chunked.least.peak, "exact": least}
    return {**peaks, "time": round(ratio, 3), "error": round(error, 3)}

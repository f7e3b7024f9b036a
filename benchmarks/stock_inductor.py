"""One training step of a reference model as stock ``torch.compile`` runs it: peak, extra flops, times.

    python benchmarks/stock_inductor.py MODEL METHOD BUDGET

prints one JSON object. METHOD is one of those of :data:`METHODS`; BUDGET is PyTorch's
``activation_memory_budget``. One process for each, since compiled code and caches stay in a process.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch.utils.flop_counter import FlopCounterMode

import hybridremat
from hybridremat.analysis.measure import loss_of
from hybridremat.files import write_atomic
from hybridremat.graph.tracing.flops import node_flops
from hybridremat.zoo.models import reference_model

BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2)
METHODS = {
    "budget": BUDGETS,
    "per-layer checkpoint": (1.0,),
    "loss alone, budget": BUDGETS[1:4],
    "loss alone, per-layer checkpoint": (1.0,),
}
"""Ways to use Inductor, and the budgets to try with each."""

COLUMNS = ("model", "method", "budget", "peak_bytes", "extra_flops_percent")

Batch = Mapping[str, Tensor]


def subject(name: str) -> tuple[nn.Module, Batch]:
    """A reference model and its batch; dropout stands behind an underscore."""
    base, _, dropout = name.partition("_")
    return reference_model(base, float(dropout or 0))


def returns_loss_alone(method: str) -> bool:
    """Whether a method runs a model that returns its loss and nothing else."""
    return method.startswith(("loss alone", "chunked"))


class LossAlone(nn.Module):
    """Returns the loss of a model and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        """The loss."""
        loss = self.model(**batch)
        return loss if isinstance(loss, Tensor) else loss.loss


class Compiler:
    """Inductor as it is, with the flops of what it is given."""

    def __init__(self) -> None:
        self.flops, self.seconds = 0, 0.0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        """A backend of ``torch.compile``."""
        started = time.process_time()
        run = compile_fx.compile_fx(module, inputs, inner_compile=self._inner)
        self.seconds += time.process_time() - started
        return run

    def _inner(self, graph: torch.fx.GraphModule, inputs: Any, **how: Any) -> Any:
        self.flops += sum(node_flops(node) for node in graph.graph.nodes if node.op == "call_function")
        return compile_fx.compile_fx_inner(graph, inputs, **how)


def checkpointed(model: nn.Module) -> nn.Module:
    """The model with each layer checkpointed; ValueError if it has no switch for that."""
    switch = getattr(model, "gradient_checkpointing_enable", None)
    if switch is None or not getattr(model, "supports_gradient_checkpointing", False):
        raise ValueError(f"{type(model).__name__} has no switch for checkpointing")
    switch(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def eager_flops(model: nn.Module, batch: Batch) -> int:
    """Flops of one step that runs op by op."""
    with FlopCounterMode(display=False) as counter:
        loss_of(model(**batch)).backward()
    return counter.get_total_flops()


def measured(name: str, method: str, budget: float) -> dict[str, Any]:
    """The figures of one way to compile a model."""
    torch.set_num_threads(1)
    model, batch = subject(name)
    if "checkpoint" in method:
        model = checkpointed(model)
    if returns_loss_alone(method):
        model = LossAlone(model)
    compiler = Compiler()
    # also the first step of the model: what ViT sets in it would have it compiled, and counted, again
    eager = [eager_flops(each, batch) for each in (subject(name)[0], model)]
    model.zero_grad()
    counters.clear()
    started = time.perf_counter()
    # a graph that PyTorch has kept from an earlier run would not be handed to us, and its flops not counted
    with functorch_config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        model.compile(backend=compiler)
        found = hybridremat.measure(model, kwargs=batch, repeats=5)
    outside = bool(counters["graph_break"])  # parts that are not compiled, such as checkpointed layers of T5
    return {
        "extra_eager_flops_percent": 100 * (eager[1] / eager[0] - 1) if outside else None,
        "model": name,
        "method": method,
        "budget": budget,
        "peak_bytes": found.peak,
        "flops": compiler.flops,
        "step_seconds": found.seconds,
        "seconds": time.perf_counter() - started,
    }


def measure_all(name: str, records: Path) -> None:
    """Measure a model in every way, each in a process of its own, and replace its rows in the records."""
    found = []
    for method, budgets in METHODS.items():
        for budget in budgets:
            command = [sys.executable, __file__, name, method, str(budget)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
            if done.returncode == 0:
                found.append(json.loads(done.stdout.splitlines()[-1]))
    plain = next(row["flops"] for row in found if row["budget"] == 1.0)
    extra = [row["extra_eager_flops_percent"] or 100 * (row["flops"] / plain - 1) for row in found]
    rows = [{**row, "extra_flops_percent": round(more, 3)} for row, more in zip(found, extra, strict=True)]
    with records.open() as file:
        others = [row for row in csv.DictReader(file) if row["model"] != name]
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows([*others, *rows])
    write_atomic(records, text.getvalue())


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], sys.argv[2], float(sys.argv[3]))))

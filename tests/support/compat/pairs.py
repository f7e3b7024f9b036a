"""The same training loop on a plain model and on a wrapped one, held against each other bit for bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hybridremat
from support.compat.harness import EQUAL as EQUAL
from support.compat.harness import HOW
from support.planned_steps import planned_forwards, times_each, training_forwards, wrapped_names
from support.training import Trained, allocated_peak, allocations

_LEAST: dict[object, int] = {}


class Net(nn.Module):
    """Residual layers with dropout and norms, cheap to plan; the loss is inside if labels are given."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + self.dropout(functional.gelu(layer(x)))
        scores = self.head(self.norm(x))
        if labels is None:
            return {"scores": scores}
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores}


def net() -> tuple[Net, dict[str, torch.Tensor]]:
    """The small net and its batch, the same in every call."""
    torch.manual_seed(0)
    return Net(), {"x": torch.randn(64, 16), "labels": torch.randint(0, 5, (64,))}


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Different batches of the net's shape."""
    drawn = torch.Generator().manual_seed(7)
    return [
        {
            "x": torch.randn(64, 16, generator=drawn),
            "labels": torch.randint(0, 5, (64,), generator=drawn),
        }
        for _ in range(count)
    ]


@dataclass
class Run:
    """What one loop made: tensors by name, and the peak of each step that was measured.

    The first ``skip`` steps, which come to plan anew, are not measured. ``kept`` is the loop's own, for what
    a step must hand out.
    """

    measure: bool
    skip: int = 0
    made: Trained = field(default_factory=lambda: Trained({}))
    kept: list[Any] = field(default_factory=list)

    def step(self, call: Callable[[], Any]) -> None:
        """Run a forward and its backward, measured if this run is."""
        if self.measure and self.skip > 0:
            self.skip -= 1
            call()
        elif self.measure:
            self.made.peaks.append(allocated_peak(call))
        else:
            call()

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy; equal names are counted."""
        number = sum(key.startswith(f"{name} #") for key in self.made.tensors)
        self.made.tensors[f"{name} #{number}"] = tensor.detach().clone()

    def keep_model(self, model: nn.Module) -> None:
        """Keep parameters, buffers and gradients; a gradient that is None is told apart from zeros."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.keep(name, tensor)
        for name, parameter in model.named_parameters():
            given = parameter.grad is not None
            self.keep(f"gradient of {name}", parameter.grad if given else torch.tensor(float("inf")))


Loop = Callable[[Any, Run], None]


def learn(model: Any, run: Run, batch: Mapping[str, Any]) -> None:
    """A measured forward and backward; the loss, the gradients and the model are kept."""

    def step() -> None:
        loss = model(**batch)["loss"]
        loss.backward()
        run.keep("loss", loss)

    run.step(step)
    run.keep_model(model)


def run(loop: Loop, model: nn.Module, *, measure: bool = False, skip: int = 0) -> Trained:
    """Run a loop from one seed, and keep the model and the generator's state afterwards."""
    torch.manual_seed(1)
    result = Run(measure, skip)
    loop(model, result)
    result.keep_model(model)
    result.keep("generator", torch.get_rng_state())
    return result.made


def least_limit(model: nn.Module, batch: Mapping[str, Any], key: object = None, **how: Any) -> int:
    """The least feasible limit in bytes; remembered by ``key``."""
    if key is None or key not in _LEAST:
        found = hybridremat.plan(model, kwargs=batch, memory_limit="100000%", **HOW, **how).least_peak
        if key is None:
            return found
        _LEAST[key] = found
    return _LEAST[key]


def wrap_least(model: nn.Module, batch: Mapping[str, Any], **how: Any) -> nn.Module:
    """Wrap under the least feasible limit."""
    return hybridremat.wrap(model, kwargs=batch, memory_limit=least_limit(model, batch, **how), **HOW, **how)


def assert_equal_runs(
    loop: Loop,
    model: nn.Module,
    planned: nn.Module,
    *,
    forwards: int | None = None,
    measure: bool = False,
    skip: int = 0,
) -> Trained:
    """The same loop leaves the same numbers, and every training forward of it was planned.

    Each wrapped module must have run as many planned forwards as its plain counterpart ran with gradients in
    training mode; ``forwards`` states the number where the reference is compiled and cannot be counted.
    Returns what the planned run made.
    """
    names = wrapped_names(planned)
    with training_forwards(*(model.get_submodule(name) for name in names)) as trained:
        expected = run(loop, model)
    with planned_forwards() as ran:
        made = run(loop, planned, measure=measure, skip=skip)
    assert expected.differences(made) == []
    counts = times_each(trained, model, names) if forwards is None else dict.fromkeys(names, forwards)
    assert counts and all(counts.values()), f"no training forwards to compare: {counts}"
    done = times_each(ran, planned, names)
    assert done == counts, f"planned forwards {done}, training forwards {counts}"
    return made


def hold(
    loop: Loop, model: nn.Module, planned: nn.Module, *, skip: int = 0, forwards: int | None = None
) -> str:
    """:func:`assert_equal_runs`; assert memory as well, after the first ``skip`` steps.

    Returns the remark of the line: what was measured.
    """
    made = assert_equal_runs(loop, model, planned, forwards=forwards, measure=True, skip=skip)
    plan = hybridremat.get_plan(planned)
    peak = max(made.peaks)
    assert plan.memory_limit is not None and peak <= plan.memory_limit, (made.peaks, plan.memory_limit)
    share = plan.memory_limit / plan.plain_peak
    return f"measured {peak} bytes, limit {plan.memory_limit} ({share:.0%} of plain)"


def wrap_share(model: nn.Module, batch: Mapping[str, Any], share: str = "100%", **how: Any) -> nn.Module:
    """Wrap under a share of the plain step, for loops that come to pass other inputs than the sample."""
    return hybridremat.wrap(model, kwargs=batch, memory_limit=share, **HOW, **how)


def hold_net(loop: Loop, *, prepare: Callable[[Net], None] | None = None, **how: Any) -> str:
    """:func:`hold` on the small net under its least limit."""
    model, batch = net()
    if prepare is not None:
        prepare(model)
    return hold(loop, model, wrap_least(copy.deepcopy(model), batch, **how))


def allocated_after(call: Callable[[], Any]) -> int:
    """Bytes that a call leaves allocated, without the help of the cycle collector."""
    gc.collect()
    gc.disable()
    try:
        return sum(allocations(call))
    finally:
        gc.enable()

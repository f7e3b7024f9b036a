"""One way to try a model: plain training against planned training, bit for bit, in the memory promised.

A :class:`Case` builds a model and a batch. :func:`hold_to_plain` trains both ways at two limits (half-way
between the least feasible limit and the plain step, and the least one) and returns the figures of a line in
the table of docs/compatibility.md.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.compiler.units import find_units
from support.training import Trained, loss_in, train, train_plain

EQUAL, EQUAL_TO_JOINT = "bit-equal to plain eager", "bit-equal to the unplanned joint graph"
HOW: dict[str, Any] = {"cost_model": "flops", "workers": 1, "progress": False}


@dataclass(frozen=True)
class Case:
    """A model with the batch it is trained on.

    Attributes
    ----------
    group, name
        Heading and line of the compatibility table.
    build
        Makes the model (in training mode) and the keyword arguments of one step. The seed is set before.
    needs
        Packages without which the case cannot be tried.
    everyday
        Whether `make test` runs it too, as the representative of a mechanism.
    loss_in
        Finds the loss in the model's output, or computes it.
    how
        Further arguments for ``hybridremat.plan`` and ``wrap``.
    remark
        What the table should say beside the figures.
    """

    group: str
    name: str
    build: Callable[[], tuple[nn.Module, dict[str, Any]]]
    needs: tuple[str, ...] = ()
    everyday: bool = False
    loss_in: Callable[[Any], torch.Tensor] = loss_in
    how: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""

    def fresh(self) -> tuple[nn.Module, dict[str, Any]]:
        """The same model and batch in every call."""
        for package in self.needs:
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed; `make compat` installs it")
        torch.manual_seed(0)
        model, batch = self.build()
        return model.train(), batch


def parameters(cases: list[Case], longer: set[str]) -> list[Any]:
    """Cases as pytest parameters; ``longer`` ones are slow, and what is not everyday is for `make compat`."""

    def mark(case: Case) -> Any:
        everyday = pytest.mark.slow if case.name in longer else ()
        return everyday if case.everyday else pytest.mark.compat

    return [pytest.param(case, id=case.name, marks=mark(case)) for case in cases]


class _Through(nn.Module):
    """Calls the compiled copy of a model, and shows the names of the copy itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["plain"] = model  # not a submodule: names stay as they are
        self.__dict__["compiled"] = torch.compile(model, backend="aot_eager", dynamic=False)

    def forward(self, **inputs: Any) -> Any:
        return self.compiled(**inputs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain.named_buffers(*args, **kwargs)


def _call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.compiler.disable`` takes compiled functions for what they were made of."""
    return compiled(*args, **kwargs)


def train_joint(
    model: nn.Module,
    batch: dict[str, Any],
    units: Sequence[str] = (),
    *,
    unread: Collection[str] = (),
    rest: bool = True,
    **how: Any,
) -> Trained:
    """Train a copy through AOTAutograd's own joint graph, or that of each unit, unplanned.

    ``unread``: parameters without a gradient, to which it gives zeros where graphs break. ``rest``: what
    runs between units is captured, too.
    """
    model = copy.deepcopy(model)
    for name in unread:
        model.get_parameter(name).requires_grad_(False)
    limits = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
    with torch._dynamo.config.patch(**limits, use_numpy_random_stream=True):
        for unit in find_units(model, units).values() if units else ():
            compiled = torch.compile(unit.forward, backend="aot_eager", dynamic=False)
            unit.forward = torch.compiler.disable(partial(_call, compiled))
        return train(_Through(model) if rest else model, batch, **how)


def without_caches(model: nn.Module) -> nn.Module:
    """A copy that makes no key/value caches in training, as wrapped models do.

    A cache copies keys and values into another layout, and on some CPUs (AVX-512 among them) matrix products
    of another layout differ in their last bits.
    """
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    return model


class Expected:
    """What plain training makes, and AOTAutograd's own joint graph: made once each, when asked for.

    ``units``: the modules that are graphs of their own.
    """

    def __init__(
        self, model: nn.Module, batch: dict[str, Any], *, units: Sequence[str] = (), **how: Any
    ) -> None:
        model = without_caches(model)
        self.eager = train_plain(model, batch, **how)
        names = [name for name, _ in model.named_parameters()]
        unread = [name for name in names if f"gradient 0 {name}" not in self.eager.tensors]
        self._train_joint = partial(train_joint, model, batch, units, unread=unread, **how)
        self._units = units

    @cached_property
    def joint(self) -> Trained:
        """The unplanned joint graph, which shares nothing with this package."""
        return self._train_joint()

    @cached_property
    def units(self) -> Trained:
        """The same with code between units as it is."""
        return self._train_joint(rest=False) if self._units else self.joint

    def equal_to(self, trained: Trained) -> str:
        """Assert that planned training is plain training, or, where the unplanned joint graph is not either,
        that it is the joint graph's; return which, in words."""
        if not self.eager.differences(trained):
            return EQUAL
        joint = self.units if not self.units.differences(trained) else self.joint
        assert self.eager.differences(joint), (
            f"differs from plain, as the joint graph does not: {self.eager.differences(trained)}"
        )
        assert joint.differences(trained) == []
        return EQUAL_TO_JOINT


def hold_to_plain(case: Case, steps: int = 3) -> dict[str, Any]:
    """Train plain and planned; assert equality and memory; return the figures of the case's line."""
    model, batch = case.fresh()
    how = {**HOW, **case.how}
    learn = {"steps": steps, "loss_in": case.loss_in}
    expected = Expected(model, batch, units=how.get("units", ()), **learn)
    started = time.perf_counter()
    first = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **how)
    seconds = time.perf_counter() - started
    least, plain = first.least_peak, first.plain_peak
    figures: dict[str, Any] = {"plain_bytes": plain, "planning_seconds": seconds}
    outcomes = set()
    for share, limit in {"half-way": (least + plain) // 2, "least": least}.items():
        planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=limit, **how)
        plan = hybridremat.get_plan(planned)
        trained = train(planned, batch, **learn)
        outcomes.add(expected.equal_to(trained))
        assert max(trained.peaks) <= limit, (share, trained.peaks, limit)
        off = max(abs(peak - plan.predicted_peak) / plan.predicted_peak for peak in trained.peaks)
        figures[share] = {
            "limit": limit / plain,
            "extra_flops": plan.extra_flops,
            "predicted": plan.predicted_peak,
            "measured": max(trained.peaks),
            "off": off,
        }
    return figures | {"outcome": ", ".join(sorted(outcomes))}

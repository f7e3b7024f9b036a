"""The two steps that ``hybridremat doctor`` runs: a small net, wrapped, against the same net plain."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridremat.analysis.measure import loss_of, measure
from hybridremat.analysis.needs import training_needs
from hybridremat.analysis.paired_steps import Subject, differences, train
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.api import get_plan, wrap
from hybridremat.cli.doctor_checks import FAILED, OK, Check
from hybridremat.units import format_bytes

LIMIT = "70%"
CLOSE = 1e-2  # of the largest number of a gradient: convolutions of float32 may round to TF32
STEPS = 2


class DoctorNet(nn.Module):
    """Convolutions, BatchNorm, dropout and a product, a quarter of a MiB for each activation."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        # no bias: behind one, BatchNorm leaves a gradient of rounding errors alone, which nothing is close to
        self.convolutions = nn.ModuleList(nn.Conv2d(c, 16, 3, padding=1, bias=False) for c in (3, 16, 16))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of images (N, 3, H, W) against classes (N)."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = self.dropout(functional.gelu(norm(convolution(x))))
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def _made(device: str, dropout: float) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = DoctorNet(dropout).to(device)
    batch = {"x": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))}
    return model, {name: tensor.to(device) for name, tensor in batch.items()}


def try_step(device: str) -> Check:
    """A planned step op by op: numbers are to be those of plain PyTorch, the peak within the limit."""
    name = f"step, {device}"
    plain, batch = _made(device, dropout=0.1)
    planned = copy.deepcopy(plain)
    # The same kernels in both, whatever else is asked of cuDNN.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        _wrapped(planned, batch, compiler="eager")
        both = zip(_trained(plain, batch, STEPS), _trained(planned, batch, STEPS), strict=True)
        differing = [found for ours, theirs in both for found in differences(ours, theirs)]
        figures = _figures(planned, batch)
    figures["bit_equal"] = not differing
    if differing:
        text = f"{len(differing)} tensors differ from plain PyTorch's, the first is {differing[0]}"
        advice = "report it with this command's --json; until then compare a training of yours with plain"
        return Check(name, FAILED, text, advice, figures)
    return _verdict(name, figures, f"{STEPS} optimizer steps equal to plain PyTorch's, bit for bit")


def try_compiled_step(device: str) -> Check:
    """A planned step that Inductor compiles: gradients are to be close, the peak within the limit."""
    name = f"compiled step, {device}"
    plain, batch = _made(device, dropout=0.0)
    planned = copy.deepcopy(plain)
    _wrapped(planned, batch, compiler="inductor")
    (theirs,), (ours,) = _trained(plain, batch, 1), _trained(planned, batch, 1)
    error = max(_error(ours[key], theirs[key]) for key in theirs if key.startswith(("loss", "gradient")))
    figures = {**_figures(planned, batch), "error": error}
    if not error <= CLOSE:  # also if it is no number
        text = f"a gradient is off by {error:.1e} of its largest number"
        return Check(name, FAILED, text, "train without compiler=, and report it with --json", figures)
    return _verdict(name, figures, f"gradients within {error:.0e} of plain PyTorch's")


def _wrapped(model: nn.Module, batch: dict[str, Tensor], compiler: Literal["eager", "inductor"]) -> None:
    wrap(
        model,
        kwargs=batch,
        memory_limit=LIMIT,
        on_infeasible="least",
        compiler=compiler,
        cost_model="flops",
        workers=1,
        cache=False,
        progress=False,
    )


def _trained(model: nn.Module, batch: dict[str, Tensor], steps: int) -> list[dict[str, Tensor]]:
    return [tensors for tensors, _ in train(Subject(model, batch, loss_of), steps)]


def _figures(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, object]:
    plan = get_plan(model)
    measured = measure(model, kwargs=batch, repeats=1)
    whole = training_needs(SampleStep(model, (), batch), "adamw").formula(plan.needed)
    return {
        "limit": plan.memory_limit,
        "predicted_peak": plan.predicted_peak,
        "measured_peak": measured.peak,
        "plain_peak": plan.plain_peak,
        "in_all": whole,
    }


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))


def _verdict(name: str, figures: dict[str, object], numbers: str) -> Check:
    limit, predicted, measured = (int(str(figures[k])) for k in ("limit", "predicted_peak", "measured_peak"))
    peaks = (
        f"limit {format_bytes(limit)}, predicted {format_bytes(predicted)}, measured {format_bytes(measured)}"
    )
    if measured > limit:
        advice = "leave room in your limits (reserve=), and report it with this command's --json"
        return Check(name, FAILED, f"above the limit: {peaks}", advice, figures)
    return Check(name, OK, f"{numbers}\n{peaks}\nin all: {figures['in_all']}", figures=figures)

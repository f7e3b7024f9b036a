"""What exchanges and polishing make of real steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridremat
from support.training import small, train, train_plain
from support.wrapping import HOW


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((256, 64, 1), (64, 64, 3), (64, 256, 1))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(into, out, size, padding=size // 2, bias=False) for into, out, size in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _, out, _ in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y)) + (x if number == 2 else 0)
            y = torch.relu(y)
        return y


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


@pytest.mark.full_effort
def test_three_bottlenecks_are_faster_than_their_blocks_composed() -> None:
    """At 40 % of the full peak, by 4 % of the iteration or more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 256, 1), *(Bottleneck() for _ in range(3)), Mean())
    plan = hybridremat.plan(model, (torch.randn(4, 3, 28, 28),), memory_limit="40%", **HOW)
    assert plan.composed_overhead is not None
    assert (1 + plan.overhead) / (1 + plan.composed_overhead) < 0.96
    assert "exchanges" in str(plan)


@pytest.mark.full_effort
def test_polished_plans_train_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small("convnet")
    composed = hybridremat.frontier(model, kwargs=batch, **HOW)
    limit = (composed.least.peak + composed.plain_peak) // 2
    expected = train_plain(model, batch)
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **HOW)
    plan, trained = hybridremat.get_plan(model), train(model, batch)
    assert expected.differences(trained) == []
    assert max(trained.peaks) == plan.predicted_peak <= limit
    assert plan.overhead <= composed.at(memory_limit=limit).overhead

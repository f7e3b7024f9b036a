"""nn.LSTM and its kind are refused with a way out; cells in a loop train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.errors import CaptureError
from support.training import train, train_plain

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


class Recurrent(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.cells, self.head = kind(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.cells(x)[0]).pow(2).mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_refused_with_a_way_out(kind):
    with pytest.raises(CaptureError, match=rf"cells is an nn\.{kind.__name__}.*nn\.LSTMCell"):
        hybridremat.wrap(Recurrent(kind), kwargs={"x": torch.randn(4, 2, 8)}, memory_limit="100%", **HOW)


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        state = (torch.zeros(x.shape[1], 8), torch.zeros(x.shape[1], 8))
        for step in x:
            state = self.cell(step, state)
        return self.head(state[0]).pow(2).mean()


@pytest.mark.slow
def test_cells_in_a_loop_equal_plain_training():
    torch.manual_seed(0)
    model, batch = Unrolled(), {"x": torch.randn(4, 16, 8)}
    expected = train_plain(model, batch)
    least = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW).least_peak
    planned = hybridremat.wrap(model, kwargs=batch, memory_limit=least, **HOW)
    trained = train(planned, batch)
    assert expected.differences(trained) == []
    assert max(trained.peaks) <= least

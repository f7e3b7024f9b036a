"""Training that Inductor compiles: its losses are as near to plain PyTorch's as those of torch.compile."""

from __future__ import annotations

import copy

import pytest
import torch

import hybridremat
from support.compiled import compiled, needs_compiler, nothing_kept_by_inductor
from support.training import loss_in, small

pytestmark = [pytest.mark.slow, needs_compiler]

STEPS = 50
NOISE = 4
"""Trainings that begin one rounding error away from the first."""
SPREAD = 2.0
"""Rounding errors grow in training, and no two ways to round grow alike: how much more than others."""


@pytest.fixture(autouse=True)
def _nothing_kept():
    with nothing_kept_by_inductor():
        yield


def batches(batch, count=STEPS):
    """Rows of the batch in another order each time, so that no step repeats the one before."""
    drawn = torch.Generator().manual_seed(3)
    rows = len(next(iter(batch.values())))
    for _ in range(count):
        order = torch.randint(rows, (rows,), generator=drawn)
        yield {name: tensor[order] for name, tensor in batch.items()}


def losses(model, start, batch):
    """The losses of some steps with AdamW, from given parameters and buffers."""
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    found = []
    for given in batches(batch):
        optimizer.zero_grad()
        loss = loss_in(model(**given))
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return torch.tensor(found, dtype=torch.float64)


def one_rounding_away(start, seed):
    """The state with every weight changed by about the relative error of float32."""
    drawn = torch.Generator().manual_seed(seed)

    def changed(tensor):
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(2, tensor.shape, generator=drawn) * 2 - 1
        return tensor * (1 + torch.finfo(tensor.dtype).eps * signs)

    return {name: changed(tensor) for name, tensor in start.items()}


def apart(one, other):
    return float((one - other).abs().max())


def noise(model, start, batch, first):
    """How far trainings from nearly equal weights come apart: what rounding alone does to losses."""
    others = (losses(model, one_rounding_away(start, seed), batch) for seed in range(NOISE))
    return max(apart(other, first) for other in others)


def without_dropout(name):
    model, batch = small(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    return model, batch


@pytest.mark.parametrize(("name", "share"), [("transformer", "75%"), ("convnet", "90%")])
def test_losses_stay_as_near_to_eager_as_stock_inductors(name, share):
    model, batch = without_dropout(name)
    start = copy.deepcopy(model.state_dict())
    eager = losses(copy.deepcopy(model), start, batch)
    stock_model = copy.deepcopy(model)
    stock_model.compile()
    stock = losses(stock_model, start, batch)
    of_rounding = noise(copy.deepcopy(model), start, batch, eager)
    compiled(model, batch, share)
    ours = losses(model, start, batch)
    made = hybridremat.get_plan(model)
    assert made.predicted_peak < made.plain_peak
    assert apart(eager[:1], eager) > 0.1  # it learns
    assert apart(ours, eager) <= SPREAD * max(apart(stock, eager), of_rounding)


def test_losses_with_dropout_are_those_of_stock_inductor():
    """Both draw the same masks, which are not those of eager PyTorch."""
    model, batch = small("transformer")
    start = copy.deepcopy(model.state_dict())
    stock_model = copy.deepcopy(model)
    stock_model.compile()
    stock = losses(stock_model, start, batch)
    of_rounding = noise(stock_model, start, batch, stock)
    compiled(model, batch, "60%")
    ours = losses(model, start, batch)
    assert apart(ours, stock) <= SPREAD * of_rounding
    torch.manual_seed(2)
    assert apart(ours[:1], torch.tensor([loss_in(model(**batch)).item()])) > 1e-3  # other masks show

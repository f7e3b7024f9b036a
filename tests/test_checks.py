"""Asserts on values in a forward: they hold in every planned step, once, and raise where they fail."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.errors import PlanError
from support.checked_nets import made
from support.training import train, train_plain
from support.wrapping import HOW, least_limit, wrap


def assert_checked(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    model(**batch).backward()
    with pytest.raises(RuntimeError, match="mean is small"):
        model(batch["x"] - 3)
    with torch.no_grad():
        model.layers[3].bias.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="values are large"):
        model(**batch)


def test_an_assert_raises_at_any_limit() -> None:
    for limit in ("100%", least_limit(*made())):
        model, batch = made()
        expected = train_plain(model, batch)
        wrap(model, batch, limit)
        assert expected.differences(train(model, batch)) == []
        assert_checked(model, batch)


@pytest.mark.slow
def test_an_assert_raises_in_compiled_steps_and_in_torch_compile() -> None:
    model, batch = made()
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", compiler="inductor", **HOW)
    assert_checked(model, batch)
    model, batch = made()
    options = {"memory_limit": "100%"}
    model.compile(backend="hybridremat", dynamic=False, options=options)
    assert_checked(model, batch)


def test_a_plan_without_an_assert_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("hybridremat.compiler.emit.is_check", lambda node: False)
    with pytest.raises(PlanError, match="an assert is missing"):
        wrap(*made())

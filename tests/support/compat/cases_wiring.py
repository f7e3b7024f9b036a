"""How modules are put together: shared, tied, called twice, with several inputs and outputs, with own ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from support.compat.harness import Case
from support.compat.own_functions import OwnFunctions
from support.compat.own_ops import HiddenEffect, ImpureOps, PureOps
from support.compat.stateful_nets import Buffers, StopsGradients, Teacher
from support.compat.wiring_nets import (
    WIDTH,
    Nested,
    Sample,
    SeveralOutputs,
    SharedAcrossTowers,
    Structured,
    Tied,
    TwoLosses,
    Unrolled,
)

ROWS, LENGTH = 4, 64


def numbers(*names: str, width: int = 16) -> dict[str, Any]:
    """Random inputs."""
    return {name: torch.randn(ROWS, LENGTH, width) for name in names}


def classes(count: int) -> torch.Tensor:
    return torch.randint(0, count, (ROWS, LENGTH))


def structured() -> dict[str, Any]:
    sample = Sample(torch.randn(ROWS, LENGTH, 16), torch.rand(ROWS, LENGTH) > 0.2)
    return {"sample": sample, "extra": {"shift": torch.randn(WIDTH)}, "pair": (classes(4), 0.5)}


def case(name: str, model: Callable[[], nn.Module], batch: Callable[[], dict[str, Any]], **how: Any) -> Case:
    """A line under Wiring."""
    return Case("Wiring", name, lambda: (model(), batch()), **how)


CASES = [
    case(
        "tied embeddings, a block called twice",
        Tied,
        lambda: {"tokens": torch.randint(0, 64, (4, 32))},
        everyday=True,
    ),
    case(
        "three inputs, a shared encoder, two towers, dict of outputs",
        SharedAcrossTowers,
        lambda: {**numbers("left", "right"), "weight": torch.tensor(5.0)},
        everyday=True,
    ),
    case(
        "three outputs, one of them in the loss",
        SeveralOutputs,
        partial(numbers, "x"),
        loss_in=lambda output: output[1].pow(2).mean(),
    ),
    case(
        "two scalar losses, added outside",
        TwoLosses,
        lambda: {**numbers("x"), "labels": classes(5)},
        loss_in=lambda output: output[0] + 0.1 * output[1],
    ),
    case(
        "two scalar losses, one of them used",
        TwoLosses,
        lambda: {**numbers("x"), "labels": classes(5)},
        loss_in=lambda output: output[1],
    ),
    case("parts under no_grad, detached targets", StopsGradients, partial(numbers, "x")),
    case("a moving-average teacher inside the forward", Teacher, partial(numbers, "x", "other")),
    case(
        "buffers overwritten in the forward: BatchNorm, code book, queue",
        Buffers,
        lambda: {"x": torch.randn(64, 16)},
    ),
    case(
        "modules and parameters in nested lists and dicts, a hook", Nested, partial(numbers, "x", width=WIDTH)
    ),
    case("keyword-only dataclass, dict and tuple in, dataclass out", Structured, structured),
    case("custom autograd.Function", OwnFunctions, partial(numbers, "x"), everyday=True),
    case("torch.library ops, pure and random", PureOps, partial(numbers, "x", width=WIDTH), everyday=True),
    case(
        "torch.library op with an effect that its schema does not show",
        HiddenEffect,
        partial(numbers, "x", width=WIDTH),
        everyday=True,
    ),
    case("torch.library op that writes into a buffer", ImpureOps, partial(numbers, "x", width=WIDTH)),
    case(
        "LSTM unrolled by hand, 4 steps",
        Unrolled,
        lambda: {"tokens": torch.randint(0, 40, (64, 4))},
        everyday=True,
    ),
    case(
        "LSTM unrolled by hand, 24 steps",
        Unrolled,
        lambda: {"tokens": torch.randint(0, 40, (64, 24))},
    ),
]

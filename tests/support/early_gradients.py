"""Models whose gradients leave in the backward, and what they are trained with."""

from __future__ import annotations

from functools import partial

import torch

import hybridremat
from support.training import allocated_peak, loss_in, small
from support.wrapping import HOW

EARLY = {"gradients": "in_backward"} | HOW


def wrapped(limit="100%"):
    model, batch = small("mlp")
    return hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **EARLY), batch


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def trained(model, batch, optimizer, steps, schedule=None):
    """Losses, parameters and buffers after each step, and the peak of each forward and backward."""
    tensors, peaks = {}, []

    def run(step):
        loss = loss_in(model(**batch))
        loss.backward()
        tensors[f"loss {step}"] = loss.detach()

    torch.manual_seed(1)
    for step in range(steps):
        peaks.append(allocated_peak(partial(run, step)))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        named = [*model.named_parameters(), *model.named_buffers()]
        tensors |= {f"{name} {step}": tensor.detach().clone() for name, tensor in named}
    tensors["generator"] = torch.get_rng_state()
    return tensors, peaks


def assert_equal(mine, others):
    assert mine.keys() == others.keys()
    assert [name for name in mine if not torch.equal(mine[name], others[name])] == []

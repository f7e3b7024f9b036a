"""Steps that Inductor compiles, and how far their numbers are from exact ones."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager

import pytest
import torch
import torch._inductor.config

import hybridremat
from support.training import loss_in
from support.wrapping import HOW

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")


def nothing_kept_by_inductor() -> AbstractContextManager[None]:
    """What Inductor keeps from other runs would not be lowered again, and so not be compared."""
    return torch._inductor.config.patch(fx_graph_cache=False)


def compiled(model, batch, limit, **how):
    """The model wrapped with Inductor, with the settings of tests."""
    return hybridremat.wrap(model, kwargs=batch, memory_limit=limit, compiler="inductor", **HOW, **how)


def gradients(model, batch, seed=1):
    """Loss and gradients of one step."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = loss_in(model(**batch))
    loss.backward()
    found = {name.replace("_orig_mod.", ""): p.grad.clone() for name, p in model.named_parameters()}
    return loss.detach(), found


def error(found, exact):
    """Largest relative error of a gradient, of those that are not zero but for rounding."""
    sizes = {name: float(gradient.norm()) for name, gradient in exact.items()}
    counted = [name for name, size in sizes.items() if size > 1e-6 * max(sizes.values())]
    return max(float((found[name].double() - exact[name]).norm()) / sizes[name] for name in counted)

"""What each rank does in tests of models whose gathers are in the graph; see processes.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import hybridremat
from hybridremat.graph.costs.collectives import measured_gathers
from support.sharded_cases import HOW, Case, Tokens, local, said_of, said_of_late_wait, split, texts, trained
from support.training import traced


class Whole(nn.Module):
    """Gathers a parameter where it is read; its gradient is the mean over the ranks."""

    def forward(self, part: DTensor) -> torch.Tensor:
        """The whole parameter."""
        return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def parametrized(model: nn.Module, *, unequal: bool = False) -> nn.Module:
    """The model with parameters in parts, one on each rank.

    ``unequal``: also those that ranks share unevenly, which makes their graphs differ.
    """
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for module in list(model.modules()):
        for name, whole in list(module.named_parameters(recurse=False)):
            if unequal or len(whole) % mesh.size() == 0:
                part = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
                module.register_parameter(name, part)
                register_parametrization(module, name, Whole(), unsafe=True)
    return model


def small() -> nn.Module:
    """Two layers; where one rank stands for all, also with the parameters that they share unevenly."""
    model = Case(Tokens).model()
    del model.layers[2:]
    return parametrized(model, unequal=distributed.get_backend() == "fake")


def short(rank: int, step: int) -> dict[str, torch.Tensor]:
    """One text: there is more in parameters than in activations."""
    return {"tokens": texts(rank, step)["tokens"][:1, :32]}


def checkpointed() -> nn.Module:
    """Split along the sequence, each layer checkpointed by the model itself."""
    model = split(sequence=True)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


CASES = {
    "parameters": Case(small, short, limits=("100%", "55%")),
    "sequence": Case(lambda: split(sequence=True, words=102), limits=("100%", "50%")),
}


def waiting(model: nn.Module) -> nn.Module:
    """The model, which waits for each gradient: many that are on their way at once can crash gloo."""

    def wait(parameter: torch.Tensor) -> None:
        local(parameter.grad)

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(wait)
    return model


def every(rank: int) -> dict[str, Any]:
    """Each model at each limit, with gathers left to the plan, beside itself without plans."""
    found = {}
    for name, case in CASES.items():
        plain, _ = trained(case, waiting(case.model()), rank)
        for limit in case.limits:
            found[f"{name}, {limit}"] = _planned(case, limit, rank, plain)
    return found


def moved(rank: int) -> dict[str, Any]:
    """A model whose gathered parameters wait in a file: they are sent once they have arrived."""
    case = CASES["parameters"]
    plain, _ = trained(case, waiting(case.model()), rank)
    with tempfile.TemporaryDirectory() as folder:
        return _planned(case, "60%", rank, plain, gathers="keep", offload=f"file:{folder}")


def _planned(case: Case, limit: str, rank: int, plain: list[torch.Tensor], **changes: Any) -> dict[str, Any]:
    model = case.model()
    alone = distributed.get_backend() == "fake"
    how = {**HOW, "gathers": "plan", "memory_limit": limit, "across_ranks": not alone, **changes}
    hybridremat.wrap(model, kwargs=case.batch(rank, 0), **how)
    plan = hybridremat.get_plan(model)
    made, peaks = trained(case, model, rank)
    return {
        "equal": len(made) == len(plain) and all(map(torch.equal, made, plain)),
        "peaks": peaks,
        "predicted": plan.predicted_peak,
        "limit": plan.memory_limit,
        "again": gathers_again(plan),
        "moves": len(plan.schedule.moves),
        "same plan": hybridremat.get_plan(model) is plan,
    }


def gathers_again(plan: hybridremat.Plan) -> int:
    """How many gathers of a step run more than once."""
    ops, runs = plan.details.graph.ops, plan.schedule.steps
    return sum("all_gather" in op.target and runs.count(op.id) > 1 for op in ops)


def quick(rank: int) -> dict[str, Any]:
    """A model that is in parts, under a limit, and what the checker refuses."""
    case = CASES["parameters"]
    plain, _ = trained(case, case.model(), rank)
    try:
        _planned(case, "100%", rank, plain, gradients="in_backward")
    except hybridremat.EarlyGradientError as error:
        said = str(error)
    other = Case(checkpointed)
    own = _planned(other, "60%", rank, trained(other, checkpointed(), rank)[0], gathers="keep")
    found = _planned(case, case.limits[-1], rank, plain)
    step = traced(split(sequence=True), regather=True, **texts(0, 0))
    found["may run again"] = sorted(
        {op.target for op in step.graph.ops if op.recomputable and "_c10d_functional" in op.target}
    )
    return {**found, "checked": checked(), "early gradients": said, "checkpointed": own}


def least(_: int) -> dict[str, int]:
    """The least peak of that model, by what is said of gathers."""
    case = CASES["parameters"]
    every = {name: {"kwargs": case.batch(0, 0), "gathers": name, **HOW} for name in ("keep", "plan")}
    return {name: hybridremat.frontier(case.model(), **how).least.peak for name, how in every.items()}


def checked() -> dict[str, str]:
    """What the checker says where a collective runs once more than in the joint graph."""
    case = CASES["parameters"]
    kept, left = (traced(case.model(), regather=each, **case.batch(0, 0)) for each in (False, True))
    return {
        "gather left to the plan": said_of(left, "all_gather"),
        "gather": said_of(kept, "all_gather"),
        "reduction": said_of(left, "reduce_scatter"),
        "late wait": said_of_late_wait(left),
    }


def told(rank: int) -> dict[str, str]:
    """What ranks are told that would run different plans, and what they run afterwards."""
    make, how = CASES["parameters"].model, {**HOW, "gathers": "plan", "memory_limit": "60%"}
    batch, shorter = short(0, 0), {"tokens": texts(0, 0)["tokens"][:1, :24]}

    def said(run: Callable[[], object]) -> str:
        try:
            run()
        except hybridremat.HybridRematError as error:
            return f"{type(error).__name__}: {error}"
        return "it ran"

    model = make()
    odd = parametrized(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), unequal=True)
    rows = {"args": (torch.ones(4, 8),), "grad_outputs": "all", "memory_limit": "100%"}
    wrapped = {
        "unequal parts": said(lambda: hybridremat.wrap(odd, **how | rows)),
        "other shapes": said(lambda: hybridremat.wrap(model, kwargs=(batch, shorter)[rank], **how)),
        "alone": said(lambda: hybridremat.wrap(model, kwargs=shorter, across_ranks=False, **how)),
    }
    hybridremat.wrap(model, kwargs=batch, **how)
    new = said(lambda: model(**shorter))
    hybridremat.prepare(model, kwargs=shorter)
    model(**shorter).backward()
    model(**batch).backward()
    apart = said(lambda: model(**(batch, shorter)[rank]))
    model(**shorter).backward()

    def both_shapes() -> None:
        split_up = CASES["sequence"].model()  # constants in the graphs of ranks differ
        long, half = texts(0, 0), {"tokens": texts(0, 0)["tokens"][:, :24]}
        hybridremat.wrap(split_up, kwargs=long, **how)
        hybridremat.prepare(split_up, kwargs=half)
        for inputs in (long, half, long):
            split_up(**inputs).backward()

    wrapped["several shapes"] = said(both_shapes)
    return {**wrapped, "new shape": new, "shapes apart": apart}


def timed(_: int) -> dict[str, Any]:
    """What gathers of a model cost by profile: as measured in their group."""
    model = small()
    rates = measured_gathers(model)
    how = {**HOW, "cost_model": "profile", "memory_limit": "60%", "gathers": "plan"}
    hybridremat.wrap(model, kwargs=short(0, 0), **how)
    ops = hybridremat.get_plan(model).details.graph.ops
    return {
        "rates": [[rate.call, rate.byte] for rate in rates.values()],
        "times": [op.time for op in ops if "all_gather" in op.target],
    }

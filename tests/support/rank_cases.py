"""What each rank does in tests of several processes; see processes.py. Results are plain JSON types."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from tempfile import gettempdir

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hybridremat
from hybridremat.blocks.pareto import enumerate_options
from hybridremat.blocks.types import Effort
from hybridremat.compiler.inductor import Inductor
from hybridremat.graph.costs import cost_models as costs
from hybridremat.graph.costs import kernel_store
from hybridremat.planning import planner
from hybridremat.planning.option_cache import OptionCache
from hybridremat.runtime.planned_call import planned_call
from support.planned_steps import planned_forwards, plans_made
from support.training import Trained, Transformer, allocated_peak

HOW = {"cost_model": "flops", "workers": 1, "progress": False}
MORE = 4096  # bytes that each kernel takes more on the second rank's machine


class FewOptions(OptionCache):
    """A coarse Pareto set of each block, found in this process; knows how many it has solved."""

    solved = 0

    def with_disk(self, _):
        """Itself: nothing is read from disk or kept there."""
        return self

    def solve(self, problems, workers, on_progress, solver="auto", *_):
        effort = Effort(solves=14, solo_solves=4, deterministic_time=0.05, family_time=0.25)
        for problem in problems:
            if (problem, solver) not in self._known:
                self.solved += 1
                self._known[problem, solver] = enumerate_options(problem, effort, solver)
        return {problem: self._known[problem, solver] for problem in problems}


class Net(nn.Module):
    """BatchNorm, dropout, residuals, the loss beside the scores."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(2))

    def forward(self, x):
        x = x + functional.gelu(self.norms[0](self.first(x)))
        x = x + functional.dropout(functional.gelu(self.norms[1](self.second(x))), 0.1, self.training)
        scores = self.third(x)
        return {"loss": scores.pow(2).mean(), "scores": scores}


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batches(rank: int, count: int = 3, rows: int = 128) -> list[torch.Tensor]:
    """Batches of each rank's own."""
    drawn = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(rows, 16, generator=drawn) for _ in range(count)]


def lengths(rank: int) -> list[torch.Tensor]:
    """Batches whose shapes differ between steps and ranks."""
    return [x[: 128 - 32 * ((number + rank) % 2)] for number, x in enumerate(batches(rank))]


def train_ddp(
    model: nn.Module, given: list[torch.Tensor], *, accumulate: int = 1, measure: bool = False, **how
) -> Trained:
    """DistributedDataParallel around a model; an optimizer step after every ``accumulate`` batches."""
    parallel = DistributedDataParallel(model, **how)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    made = Trained({})
    torch.manual_seed(1)
    for number, x in enumerate(given):
        last = number % accumulate == accumulate - 1

        def step(x=x, number=number, last=last):
            with nullcontext() if last else parallel.no_sync():
                loss = parallel(x)["loss"]
                made.tensors[f"loss {number}"] = loss.detach()
                loss.backward()

        if measure:
            made.peaks.append(allocated_peak(step))
        else:
            step()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                made.tensors[f"gradient {number} {name}"] = parameter.grad.clone()
        for name, buffer in model.named_buffers():
            made.tensors[f"buffer {number} {name}"] = buffer.clone()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return Trained(
        made.tensors | {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}, made.peaks
    )


def compare(planned: nn.Module, given: list[torch.Tensor], make=None, measure: bool = True, **how) -> dict:
    """Train a plain model and the wrapped one, both in DistributedDataParallel, from the same state.

    Each step of the wrapped one must have been planned.
    """
    start = (make or net)()
    planned.load_state_dict(start.state_dict())
    planned.zero_grad()
    expected = train_ddp(start, given, **how)
    with planned_forwards() as ran:
        made = train_ddp(planned, given, measure=measure, **how)
    assert ran == [planned] * len(given), f"{len(ran)} planned forwards in {len(given)} steps"
    buckets = sum(p.numel() * p.element_size() for p in planned.parameters() if p.requires_grad)
    return {"different": expected.differences(made), "peaks": made.peaks, "buckets": buckets} | {
        "limit": hybridremat.get_plan(planned).memory_limit
    }


def wrap(model: nn.Module, x: torch.Tensor, limit, **how) -> nn.Module:
    return hybridremat.wrap(model, (x,), memory_limit=limit, **HOW, **how)


def error_of(call) -> list:
    """The type of what a call raises, its message and its figures."""
    with pytest.raises(Exception) as caught:
        call()
    return [type(caught.value).__name__, str(caught.value), getattr(caught.value, "least", None)]


@contextmanager
def machine(name: str, more: int):
    """Another machine: its figures are not known here, and every kernel takes so many bytes more."""
    measured = costs.measure_footprints

    def measure(*given):
        found = measured(*given)
        for key, item in found.footprints.items():
            found.footprints[key] = replace(item, workspace=item.workspace + more)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_store, "device_description", lambda device: name)
        patch.setattr(costs, "measure_footprints", measure)
        yield


def described(model: nn.Module) -> dict:
    plan = hybridremat.get_plan(model)
    return {"peak": plan.predicted_peak, "steps": list(plan.schedule.steps), "fingerprint": plan.fingerprint}


def whole(rank: int) -> dict:
    """Errors, one plan for all, training, ranks with other inputs and other requests."""
    (x,) = batches(rank, 1)
    options = FewOptions()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "OPTIONS", options)
        result = {"errors": errors(rank, x)}
        least = result["errors"]["infeasible"][2]
        planned = wrap(net(), x, least)
        result |= {"one plan": described(planned), "solved": options.solved}
        result["training"] = training(planned, rank)
        result["others"] = others(rank, x)
    return result


def errors(rank: int, x: torch.Tensor) -> dict:
    """What is raised on each rank; the model is as it was."""
    model = net()
    found = {
        "infeasible": error_of(lambda: wrap(model, x, 1)),
        "limit of one": error_of(lambda: wrap(model, x, "50 apples" if rank == 1 else "90%")),
        "inputs of one": error_of(lambda: wrap(model, x[:, :5] if rank == 1 else x, "90%")),
        "plan of one": error_of(lambda: plan_of_one(model, x, rank)),
        "bug of one": error_of(lambda: bug(model, x) if rank == 1 else wrap(model, x, "90%")),
        "inside out": error_of(lambda: wrap(DistributedDataParallel(net()), x, "90%")),
    }
    assert model._compiled_call_impl is None
    return found


def plan_of_one(model: nn.Module, x: torch.Tensor, rank: int) -> None:
    """The file of a plan that is there for all ranks but one."""
    if rank == 0:
        wrap(model, x, "90%")
    else:
        hybridremat.wrap(model, (x,), plan="no-such-plan.json", **HOW)


def bug(model: nn.Module, x: torch.Tensor) -> None:
    """An error that is not hybridremat's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridremat.runtime.prepare.require_matching_inputs", lambda *_: 1 // 0)
        wrap(model, x, "90%")


def training(planned: nn.Module, rank: int) -> dict:
    same = {
        "usual": compare(planned, batches(rank)),
        "accumulated": compare(planned, batches(rank, 4), accumulate=2, gradient_as_bucket_view=True),
    }
    plans = [plans_made(planned)]
    shapes = compare(planned, lengths(rank), measure=False, bucket_cap_mb=0.001)
    plans.append(plans_made(planned))
    return same | {"shapes": shapes | {"plans": plans}}


def others(rank: int, x: torch.Tensor) -> dict:
    """Ranks that differ, in kernels, requests or inputs; and a shape that comes to one rank alone."""
    with machine(f"machine {rank}", MORE if rank == 1 else 0):
        slow = described(wrap(net(), x, "100%"))
    mixed = wrap(net(), x if rank == 0 else x[:64], "100%" if rank == 0 else "90%")
    inputs = described(mixed)
    if rank == 1:
        mixed(x[:32])["loss"].backward()
        wrap(net(), x[:32], "100%", across_ranks=False)
    return {"other kernels": slow, "other inputs": inputs}


class Cells(Net):
    """The net above a recurrent module, which stays one op."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.cells = nn.GRU(width, width)

    def forward(self, x):
        return super().forward(self.cells(x.view(-1, 4, x.shape[-1]))[0].flatten(0, 1))


def recurrent(rank: int) -> dict:
    """One plan of a step with calls that stay one op, and training with it."""

    def make():
        torch.manual_seed(0)
        return Cells()

    planned = wrap(make(), batches(rank, 1)[0], "90%")
    return {"plan": described(planned), "training": compare(planned, batches(rank), make)}


def compiled(rank: int) -> dict:
    """One compiled plan for all, and training with it; ``lowered`` counts the schedules that were lowered."""
    lowered = []
    plain = Inductor.lowered

    def counted(self, *args, **how):
        lowered.append(1)
        return plain(self, *args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inductor, "lowered", counted)
        model = wrap(net(), batches(rank, 1)[0], "90%", compiler="inductor")
    trained = train_ddp(model, batches(rank), measure=True)
    buckets = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "plan": described(model),
        "limit": hybridremat.get_plan(model).memory_limit,
        "lowered": len(lowered),
        "peaks": trained.peaks,
        "buckets": buckets,
        "weights": [p.double().sum().item() for p in model.parameters()],
        "losses": [trained.tensors[f"loss {number}"].item() for number in range(3)],
    }


def tuned(rank: int) -> dict:
    """Schedules that take turns on both ranks, which do not agree on which is the fastest."""
    from hybridremat.planning import candidates
    from hybridremat.runtime import tune as tuning_of

    candidates.WINDOW = 0.5
    given, start = batches(rank, 14), net()
    expected = train_ddp(start, given)
    planned = wrap(net(), given[0], "80%")
    clock, ran = [0.0], []

    def now() -> float:  # a schedule is slow on one rank
        plans = planned_call(planned).tuning.plans
        number = [each.schedule for each in plans].index(hybridremat.get_plan(planned).schedule)
        clock[0] += SLOW[rank][number % 4]
        ran.append(plan_hash(plans[number]))
        return clock[0]

    tuning_of.clock_of = lambda _: now
    tuning = hybridremat.tune(planned, steps=12, progress=False)
    made = train_ddp(planned, given)
    record = tuning.record
    slowest = [max(SLOW[0][n % 4], SLOW[1][n % 4]) for n in range(len(tuning.plans))]
    alone = net()
    hybridremat.wrap(alone, (given[0][: 128 - 32 * rank],), memory_limit="80%", **HOW)
    return {
        "ran": ran,
        "plan": plan_hash(hybridremat.get_plan(planned)),
        "winner": record.winner,
        "slowest rank's": slowest.index(min(slowest)),
        "record": repr(record),
        "different": expected.differences(made),
        "refused": error_of(lambda: hybridremat.tune(alone, steps=12, progress=False)),
    }


SLOW = ((3.0, 1.0, 2.0, 4.0), (3.0, 4.0, 2.0, 1.0))
"""Seconds of schedules on two ranks: the one that is the best for both is the fastest on neither."""


def plan_hash(plan) -> int:
    """Tells one schedule from another."""
    return sum(n * op for n, op in enumerate(plan.schedule.steps))


def moved(rank: int) -> dict:
    """Values that wait in a file: at lengths of each rank's own, and in two units."""
    from hybridremat.planning import moving
    from hybridremat.sequence.offload.link import Link

    def towers():
        torch.manual_seed(0)
        return Transformer(2, 16)

    moving.NOMINAL = Link(1e15, 1e15, latency=0)
    drawn = torch.Generator().manual_seed(100 + rank)
    tokens = [torch.randint(0, 50, (4, 40), generator=drawn) for _ in range(3)]
    cases = {
        "sizes": (net, lengths(rank), lengths(0)[0], "65%", {}),
        "units": (towers, tokens, tokens[0], "60%", {"units": "blocks.*"}),
    }
    result = {}
    for name, (make, given, first, limit, more) in cases.items():
        model = wrap(make(), first, limit, offload=f"file:{gettempdir()}", **more)
        plan = hybridremat.get_plan(model)
        made = compare(model, given, make, measure=name == "units")
        parts = [plan.parts[number] for number in plan.places] or [plan]
        result[name] = made | {"moves": sum(len(each.schedule.moves) for each in parts)}
    return result

"""What each rank does in test_ddp_overlap.py; see processes.py and rank_cases.py."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import hybridremat
from hybridremat.compiler.handing_over import _Rest
from hybridremat.planning import planner
from support.planned_steps import planned_forwards
from support.rank_cases import HOW, FewOptions, error_of
from support.training import Trained, Transformer, allocated_peak, loss_in

SMALL_BUCKETS = {"bucket_cap_mb": 0.004}


class Deep(nn.Module):
    """Layers with dropout, one of which may be skipped; a weight is used twice."""

    def __init__(self, width: int = 32, *, skip: int = -1, broken: bool = False, twice: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.skip, self.broken, self.twice = skip, broken, twice

    def forward(self, tokens):
        x = functional.one_hot(tokens, self.layers[0].in_features).float()
        again = [self.layers[1]] if self.twice else []
        for number, layer in enumerate((*self.layers, *again)):
            if number == 3 and self.broken:
                torch._dynamo.graph_break()
            if number != self.skip:
                x = x + functional.dropout(functional.gelu(layer(x)), 0.1, self.training)
        return x.pow(2).mean()


class WithWeight(Deep):
    """Returns a parameter, which the loss reads once more."""

    def forward(self, tokens):
        return super().forward(tokens), self.layers[0].weight


def seeded(make):
    torch.manual_seed(0)
    return make()


def batches(rank: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(0, 32, (4, 24), generator=drawn) for _ in range(6)]


class Events(TorchDispatchMode):
    """The ops of a backward and the buckets that are sent, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def sections_counted():
    """Counts the sections that run."""
    ran: list[int] = []
    plain = _Rest.run

    def counted(self, number):
        ran.append(number)
        return plain(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Rest, "run", counted)
        yield ran


def total(outputs):
    """The loss of one forward; a parameter that is returned is in it, too."""
    if isinstance(outputs, tuple):
        return outputs[0] + outputs[1].pow(2).sum()
    return loss_in(outputs)


def train(model, rank, *, accumulate=1, forwards=1, measure=False, **how) -> Trained:
    """Three AdamW steps in DistributedDataParallel."""
    parallel = DistributedDataParallel(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = Trained({})
    torch.manual_seed(1)
    for number in range(3):
        for part in range(accumulate):

            def step(number=number, part=part):
                with nullcontext() if part == accumulate - 1 else parallel.no_sync():
                    loss = sum(total(parallel(x)) for x in batches(rank)[number : number + forwards])
                    loss.backward()
                made.tensors[f"loss {number} {part}"] = loss.detach()

            if measure:
                made.peaks.append(allocated_peak(step))
            else:
                step()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                made.tensors[f"gradient {number} {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    made.tensors |= {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    made.tensors["generator"] = torch.get_rng_state()
    return made


CASES = {
    "usual": (Deep, {}, {}),
    "small buckets": (Transformer, {}, SMALL_BUCKETS),
    "no_sync": (Deep, {}, {"accumulate": 2, **SMALL_BUCKETS}),
    "views": (Deep, {}, {"gradient_as_bucket_view": True, **SMALL_BUCKETS}),
    "static": (Deep, {}, {"static_graph": True, **SMALL_BUCKETS}),
    "unused": (lambda: Deep(skip=2), {}, {"find_unused_parameters": True, **SMALL_BUCKETS}),
    "two forwards": (lambda: Deep(twice=False), {"forwards": 2}, {"forwards": 2, **SMALL_BUCKETS}),
    "units": (Deep, {"units": ["layers.*"], "memory_limit": "100%"}, SMALL_BUCKETS),
    "breaks": (lambda: Deep(broken=True), {"graph_breaks": "plan", "memory_limit": "100%"}, SMALL_BUCKETS),
    "parameter returned": (WithWeight, {"grad_outputs": "all"}, SMALL_BUCKETS),
}


def whole(rank: int) -> dict:
    """Each case: what differs from plain DDP, how many sections ran, and peaks."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "OPTIONS", FewOptions())
        for name, (make, how, parallel) in CASES.items():
            plain = seeded(make)
            planned = copy.deepcopy(plain)
            hybridremat.wrap(planned, (batches(rank)[0],), **{"memory_limit": "90%"} | HOW | how)
            expected = train(plain, rank, **parallel)
            with planned_forwards() as ran, sections_counted() as sections:
                made = train(planned, rank, measure=True, **parallel)
            assert set(ran) == {planned}
            found[name] = {
                "different": expected.differences(made),
                "sections": sections,
                "peaks": made.peaks,
                "limit": hybridremat.get_plan(planned).memory_limit,
                "buckets": sum(p.numel() * p.element_size() for p in plain.parameters()),
            }
        found["order"] = order(rank)
        found["errors"] = errors(rank)
    return found


def order(rank: int) -> dict:
    """When buckets leave among the ops of a planned backward, and of a plain one."""
    found = {}
    for kind in ("plain", "planned"):
        model = seeded(Deep)
        if kind == "planned":
            hybridremat.wrap(model, (batches(rank)[0],), memory_limit="100%", **HOW)
        parallel = DistributedDataParallel(model, **SMALL_BUCKETS)
        events = Events()

        def hook(_, bucket, events=events):
            events.seen.append("bucket")
            work = distributed.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0].div_(2))

        parallel.register_comm_hook(None, hook)
        for x in batches(rank)[:3]:
            loss = total(parallel(x))
            events.seen.clear()
            with events:
                loss.backward()
        found[kind] = [each for each in events.seen if each == "bucket" or ".mm." in each]
    return found


def errors(rank: int) -> dict:
    """What a hook that fails raises, in plain DDP and in ours; all ranks go on."""
    found = {}
    for kind in ("plain", "planned"):
        model = seeded(Deep)
        if kind == "planned":
            hybridremat.wrap(model, (batches(rank)[0],), memory_limit="100%", **HOW)
        parallel = DistributedDataParallel(model, **SMALL_BUCKETS)

        def fails(gradient):
            raise ValueError("of this hook")

        model.layers[4].weight.register_hook(fails)
        found[kind] = error_of(lambda parallel=parallel: total(parallel(batches(rank)[0])).backward())
        distributed.barrier()
    return found

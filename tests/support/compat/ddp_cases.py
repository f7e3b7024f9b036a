"""What each rank does in test_ddp.py; see processes.py and rank_cases.py."""

from __future__ import annotations

import copy
import logging
import time
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional

import hybridremat
from hybridremat.planning import planner
from hybridremat.planning import ranks as talk
from support.planned_steps import planned_forwards
from support.rank_cases import FewOptions, Net, batches, compare, described, error_of, net, wrap
from support.training import Transformer, train

CLONES = 128 * 16 * 4 + 512  # DistributedDataParallel's copies of the outputs, and small tensors


def few_options(function):
    """Plan coarsely."""

    def run(rank):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "OPTIONS", FewOptions())
            return function(rank)

    return run


class Idle(Net):
    """One layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(16, 16)


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        x = functional.gelu(self.norm(self.first(x)))
        torch._dynamo.graph_break()
        return {"loss": functional.gelu(self.second(x)).pow(2).mean()}


def seeded(make):
    torch.manual_seed(0)
    return make()


@few_options
def options(rank):
    """DistributedDataParallel with each of its options, under the least limit but for what it clones."""
    found = {}
    for name, make in {"net": net, "idle": lambda: seeded(Idle)}.items():
        least = error_of(lambda make=make: wrap(make(), batches(rank)[0], 1, reserve=CLONES))[2]
        planned = wrap(make(), batches(rank)[0], least, reserve=CLONES)
        every = [{"find_unused_parameters": True}]
        if name == "net":
            every += [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"broadcast_buffers": False}]
        for how in every:
            found[f"{name}, {next(iter(how))}"] = compare(planned, batches(rank), make, **how)
    return found


@few_options
def breaks(rank):
    """A step of several graphs: its plan, and training."""
    planned = wrap(seeded(Broken), batches(rank)[0], "100%", graph_breaks="plan")
    made = compare(planned, batches(rank), lambda: seeded(Broken))
    plan = hybridremat.get_plan(planned)
    return made | {"parts": len(plan.parts), "fingerprint": plan.fingerprint}


@few_options
def transformer(rank):
    """A Transformer with dropout; times are measured, by the first rank."""
    tokens = {"tokens": torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(rank))}
    plain = seeded(Transformer)
    planned = hybridremat.wrap(
        copy.deepcopy(plain), kwargs=tokens, memory_limit="80%", workers=1, progress=False, reserve=CLONES
    )
    expected = train(nn.parallel.DistributedDataParallel(plain), tokens, measure=False)
    with planned_forwards() as ran:
        made = train(nn.parallel.DistributedDataParallel(planned), tokens)
    assert ran == [planned] * 3
    plan = hybridremat.get_plan(planned)
    buckets = sum(p.numel() * p.element_size() for p in plain.parameters())
    figures = {"peaks": made.peaks, "limit": plan.memory_limit, "buckets": buckets}
    return figures | {"different": expected.differences(made), "overhead": plan.overhead} | described(planned)


@few_options
def circles(rank):
    """Three ranks, the middle one with another batch, one late."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    talk.logger.addHandler(handler)
    talk.PATIENCE = timedelta(seconds=3)
    if rank == 2:
        time.sleep(8)
    (x,) = batches(0, 1)
    plan = described(wrap(net(), x[:64] if rank == 1 else x, "100%"))
    return plan | {"solved": planner.OPTIONS.solved, "heard": heard}


@few_options
def sharded(rank):
    """FSDP inside, and FSDP around."""
    x = batches(rank)[0]
    inner = net()
    fully_shard(inner)
    found = {
        "FSDP inside": error_of(lambda: wrap(FullyShardedDataParallel(net(), **FSDP), x, "100%")),
        "fully_shard inside": error_of(lambda: wrap(inner, x, "100%")),
        "SyncBatchNorm": error_of(lambda: wrap(nn.SyncBatchNorm.convert_sync_batchnorm(net()), x, "100%")),
    }
    after = wrap(net(), x, "100%")
    fully_shard(after)
    found["fully_shard around"] = error_of(lambda: after(x))
    ends = []
    planned = wrap(net(), x, "100%")
    with planned_forwards() as ran:
        for model in (net(), planned):
            ends.append(train_sharded(FullyShardedDataParallel(model, **FSDP), batches(rank)))
    assert ran == [planned] * 3
    found["FSDP around equal"] = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    return found


FSDP = {"device_id": torch.device("cpu"), "use_orig_params": True}


def train_sharded(model, given):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in given:
        optimizer.zero_grad()
        model(x)["loss"].backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]

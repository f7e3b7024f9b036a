"""What each rank does in tests of units that FSDP2 shards; see processes.py. Results are plain JSON types."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed, fx, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import hybridremat
from hybridremat import Fsdp
from hybridremat.compiler.capture import whole_lookups
from hybridremat.compiler.check import check
from hybridremat.compiler.emit import emit
from hybridremat.compiler.units import find_units
from hybridremat.graph.costs.allocations import record
from hybridremat.graph.garbage import without_collection
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.private_collectives import arrived, empty_masks
from hybridremat.graph.private_torch import TorchDynamoException
from hybridremat.graph.tracing.trace import TracedStep
from support.training import traced

HOW = {"cost_model": "flops", "workers": 1, "progress": False, "cache": False}


class Layer(nn.Module):
    """Attention and a feed-forward net, with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mixed = nn.Linear(width, 3 * width, bias=False)
        self.out, self.up, self.down = (nn.Linear(*s) for s in ((width,) * 2, (width, 99), (99, width)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mixed(self.norms[0](x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in mixed)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norms[1](x)))))


class Tokens(nn.Module):
    """A small language model; ``between``: code that breaks the graph between its layers."""

    def __init__(self, dropout: float = 0.1, *, between: bool = False) -> None:
        super().__init__()
        self.embed, self.between = nn.Embedding(101, 34), between
        self.layers = nn.ModuleList(Layer(34, dropout) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(34), nn.Linear(34, 101)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            if self.between:
                torch._dynamo.graph_break()
                x = 1.5 * torch.tanh(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


class Images(nn.Module):
    """Stages of convolutions with BatchNorm, of odd widths, which no two ranks share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(map(self._stage, (3, 9, 17), (9, 17, 33)))
        self.head = nn.Linear(33, 10)

    @staticmethod
    def _stage(before: int, after: int) -> nn.Module:
        first = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        norms = (nn.BatchNorm2d(after), nn.BatchNorm2d(after))
        second = nn.Conv2d(after, after, 3, padding=1)
        return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            images = stage(images)
        return functional.log_softmax(self.head(images.mean((2, 3))), -1)[:, 0].neg().mean()


def frozen() -> nn.Module:
    model = Tokens()
    model.layers[1].requires_grad_(requires_grad=False)
    model.embed.requires_grad_(requires_grad=False)
    return model


def tied() -> nn.Module:
    model = Tokens()
    model.head.weight = model.embed.weight
    return model


def texts(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(101, (4, 48), generator=torch.Generator().manual_seed(10 * rank + step))}


def pictures(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"images": torch.randn(8, 3, 48, 48, generator=torch.Generator().manual_seed(10 * rank + step))}


@dataclass(frozen=True)
class Case:
    """A model, what it is fed, its units, and how they are sharded, under some limits."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, torch.Tensor]] = texts
    units: Sequence[str] = ("layers.*",)
    options: tuple[tuple[str, Any], ...] = ()
    limits: Sequence[str] = ("100%", "60%")

    def planned(self, limit: str, *, alone: bool) -> nn.Module:
        """The model with its units planned."""
        ranks = distributed.get_world_size()
        fsdp = Fsdp(ranks, **dict(self.options)) if self.options else ranks
        how = {**HOW, "fsdp": fsdp, "across_ranks": not alone, "memory_limit": limit}
        how["on_infeasible"] = "least"  # of 1 %
        return hybridremat.wrap_each(self.model(), self.units, kwargs=self.batch(0, 0), **how)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def sharded(self, model: nn.Module) -> nn.Module:
        options = dict(self.options)
        again = {} if options.pop("reshard_after_forward", True) else {"reshard_after_forward": False}
        tail = options.pop("tail", ())
        policy = {"mp_policy": MixedPrecisionPolicy(**options)} if options else {}
        for name, unit in find_units(model, self.units).items():
            if name not in tail:
                fully_shard(unit, **policy, **again)
        if tail:
            fully_shard([*map(model.get_submodule, tail)], **policy, reshard_after_forward=False)
        return fully_shard(model, **policy)


ALL = ("embed", "layers.*", "norm", "head")
TAIL = (("tail", ("norm", "head")),)
HALF = torch.bfloat16
QUICK = {
    "tokens": Case(Tokens, limits=("60%", "1%")),
    "every module a unit": Case(Tokens, units=ALL, limits=("70%",)),
    "tail": Case(Tokens, units=ALL, options=TAIL, limits=("70%",)),
}
MORE = {
    "plain tokens": Case(Tokens, limits=("100%", "45%")),
    "tied": Case(tied, limits=("60%",)),
    "frozen": Case(frozen, limits=("60%",)),
    "breaks": Case(lambda: Tokens(between=True), limits=("70%",)),
    "images": Case(Images, pictures, ("stages.*",), limits=("100%",)),
    "bfloat16": Case(
        lambda: Tokens(0.0), options=(("param_dtype", torch.bfloat16), ("reduce_dtype", torch.float32))
    ),
    "all in bfloat16": Case(lambda: Tokens(0.0), options=(("param_dtype", torch.bfloat16),), limits=("60%",)),
    "kept after the forward": Case(Tokens, options=(("reshard_after_forward", False),), limits=("60%",)),
    "tied tail": Case(tied, units=ALL, options=(("tail", ("norm", "embed", "head")),), limits=("70%",)),
    "tail in bfloat16": Case(
        lambda: Tokens(0.0),
        units=ALL,
        options=(*TAIL, ("param_dtype", HALF), ("reduce_dtype", HALF), ("output_dtype", HALF)),
        limits=("70%",),
    ),
}


EVERY = {**QUICK, **MORE}


def trained(case: Case, model: nn.Module, rank: int) -> tuple[list[torch.Tensor], list[int]]:
    """Losses, gradients, parameters and buffers of three steps, and their peaks in bytes."""
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made: list[torch.Tensor] = []
    peaks = []
    for number in range(3):
        batch = case.batch(rank, number)

        with without_collection():
            device = next(model.parameters()).device.type
            peaks.append(record(device, partial(_step, model, batch, made)).peak)
        made += [local(each.grad).clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    made += [local(each.detach()).clone() for each in (*model.parameters(), *model.buffers())]
    return made, peaks


def _step(
    model: nn.Module, batch: dict[str, torch.Tensor], made: list[torch.Tensor], _: object
) -> None:
    loss = model(**batch)
    made.append(loss.detach())
    loss.backward()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "to_local", lambda: tensor)()


def quick(rank: int) -> dict[str, Any]:
    """The first cases, with what is refused."""
    return {**run_cases(QUICK, rank), "refused": {**refused(), **tails_refused()}}


def more(rank: int) -> dict[str, Any]:
    """All others."""
    return run_cases(MORE, rank)


FEW = ("tokens", "images", "kept after the forward")
"""Those that processes train in every run of the tests."""


def few(rank: int) -> dict[str, Any]:
    """A few of all."""
    return run_cases({name: case for name, case in EVERY.items() if name in FEW}, rank)


def rest(rank: int) -> dict[str, Any]:
    """All but these."""
    return run_cases({name: case for name, case in EVERY.items() if name not in FEW}, rank)


def run_cases(cases: dict[str, Case], rank: int) -> dict[str, Any]:
    alone = distributed.get_backend() == "fake"
    found = {}
    for name, case in cases.items():
        plain, _ = trained(case, case.sharded(case.model()), rank)
        for limit in case.limits:
            model = case.planned(limit, alone=alone)
            plan = hybridremat.get_plan(model)
            made, peaks = trained(case, case.sharded(model), rank)
            found[f"{name}, {limit}"] = {
                "equal": len(made) == len(plain) and all(map(torch.equal, made, plain)),
                "peaks": peaks,
                "predicted": plan.predicted_peak,
                "limit": plan.memory_limit,
                "same plan": hybridremat.get_plan(model) is plan,
                "buffer": largest_buffer(case),
            }
    return found


def largest_buffer(case: Case) -> int:
    """Bytes of the largest collective's buffer, padded rows and all."""
    model = case.model()
    units = find_units(model, case.units).values()
    every = [sum(each.nbytes for each in unit.parameters()) for unit in units]
    return max(*every, sum(each.nbytes for each in model.parameters()) - sum(every)) * 11 // 10


def refused() -> dict[str, str]:
    """What the first step says of a model that is sharded in another way than was planned."""
    case, batch = QUICK["tokens"], texts(0, 0)

    def layers(**options: Any) -> Callable[[nn.Module], None]:
        def shard(model: nn.Module) -> None:
            for layer in model.layers:
                fully_shard(layer, **options)
            fully_shard(model)

        return shard

    def checkpointed(model: nn.Module) -> None:
        model.layers[1] = checkpoint_wrapper(model.layers[1])
        case.sharded(model)

    def unsynchronized(model: nn.Module) -> None:
        case.sharded(model)
        model.set_requires_gradient_sync(False)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    whole = hybridremat.wrap(case.model(), kwargs=batch, memory_limit="100%", across_ranks=False, **HOW)
    return {
        "not said": _told(_planned(fsdp=None), case.sharded),
        "a part alone": _told(whole, lambda model: fully_shard(model.layers[0])),
        "not sharded": _told(_planned(), lambda _: None),
        "other ranks": _told(_planned(fsdp=3), case.sharded),
        "the model is whole": _told(_planned(), lambda model: [fully_shard(each) for each in model.layers]),
        "a unit is whole": _told(_planned(), lambda model: [*map(fully_shard, (model.layers[0], model))]),
        "no unit": _told(_planned(), lambda model: [fully_shard(model.head), case.sharded(model)]),
        "other dtypes": _told(_planned(), layers(mp_policy=policy)),
        "kept": _told(_planned(), layers(reshard_after_forward=False)),
        "parameters away": _told(_planned(), layers(offload_policy=CPUOffloadPolicy(pin_memory=False))),
        "gradients not reduced": _told(_planned(), unsynchronized),
        "checkpointed": _told(_planned(), checkpointed),
        "other shape": _told(_planned(), case.sharded, {"tokens": batch["tokens"][:, :24]}),
    }


def tails_refused() -> dict[str, str]:
    """What is said of a group of units that was not planned, or of one that is none."""
    together, ranks = QUICK["tail"].sharded, distributed.get_world_size()

    def tailed(*names: str) -> Fsdp:
        return Fsdp(ranks, tail=names)

    def unplanned(*names: str) -> str:
        try:
            _planned(ALL, fsdp=tailed(*names))
        except hybridremat.HybridRematError as error:
            return str(error)
        return "it was planned"

    return {
        "no units together": _told(_planned(), together),
        "units together": _told(_planned(ALL), together),
        "a tail apart": _told(_planned(ALL, fsdp=tailed("norm", "head")), Case(Tokens, units=ALL).sharded),
        "a tail of no units": unplanned("norm", "heads"),
        "a tail not in a row": unplanned("layers.1", "head"),
    }


def _planned(units: Sequence[str] = ("layers.*",), **changes: Any) -> nn.Module:
    how = {"across_ranks": False, "memory_limit": "100%", "fsdp": distributed.get_world_size(), **changes}
    return hybridremat.wrap_each(QUICK["tokens"].model(), units, kwargs=texts(0, 0), **HOW, **how)


def _told(
    model: nn.Module, shard: Callable[[nn.Module], object], inputs: dict[str, torch.Tensor] | None = None
) -> str:
    shard(model)
    try:
        model(**inputs or texts(0, 0))
    except hybridremat.ModelError as error:
        return str(error)
    return "it ran"


class FeedForward(nn.Module):
    """A feed-forward net that is split over ranks, by tensors or along the sequence."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Split(nn.Module):
    """Three of them with a loss; as many ``words``."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 32)
        self.layers = nn.ModuleList(FeedForward() for _ in range(3))
        self.head = nn.Linear(32, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def split(*, sequence: bool, mesh: DeviceMesh | None = None, words: int = 101) -> nn.Module:
    """The model with its layers split over the ranks of a mesh, or all, along the sequence with its ends."""
    torch.manual_seed(0)
    model = Split(words)
    mesh = mesh or init_device_mesh("cpu", (distributed.get_world_size(),))
    along = Shard(1) if sequence else Replicate()
    how = {
        "up": ColwiseParallel(input_layouts=along),
        "down": RowwiseParallel(output_layouts=along, use_local_output=True),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, {**({"norm": SequenceParallel()} if sequence else {}), **how})
    if sequence:
        outer = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
            "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, outer)
    return model


def split_in_words(embedding: ParallelStyle) -> nn.Module:
    """The model with its embedding and head split, too, on a mesh of their own."""
    model, mesh = split(sequence=False), init_device_mesh("cpu", (distributed.get_world_size(),))
    head = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, {"embed": embedding, "head": head})


WAYS: dict[str, Callable[[], nn.Module]] = {
    "tensors": lambda: split(sequence=False),
    "sequence": lambda: split(sequence=True),
    "words in rows": lambda: split_in_words(RowwiseParallel(input_layouts=Replicate())),
    "words in columns": lambda: split_in_words(ColwiseParallel(output_layouts=Replicate())),
}
"""Ways to split the model over all ranks."""
HOW_SPLIT = (("60%", None), ("60%", "layers.*")), (("100%", None), ("60%", None))
"""Limits and units of a model that is split in words or along the sequence, and in layers alone."""


def by_tensors(rank: int) -> dict[str, Any]:
    """Models that are split, as a whole and by units; what the checker says of a collective too many."""
    alone = distributed.get_backend() == "fake"
    case, found = Case(Split), {}
    for name, made_so in WAYS.items():
        plain, _ = trained(case, made_so(), 0)
        for limit, units in HOW_SPLIT[name == "tensors"]:
            model = made_so()
            how = {**HOW, "across_ranks": not alone, "memory_limit": limit, "units": units}
            hybridremat.wrap(model, kwargs=texts(0, 0), **how)
            plan = hybridremat.get_plan(model)
            made, peaks = trained(case, model, 0)
            found[f"{name}, {limit}" + ", units" * (units is not None)] = {
                "equal": all(map(torch.equal, made, plain)),
                "peaks": peaks,
                "predicted": plan.predicted_peak,
                "limit": plan.memory_limit,
                "untried": list(plan.untried),
            }
    if alone:
        found |= {"broken": broken_lookups(), "behind a collective": behind_a_collective(), "late": late()}
        found["left masks"] = left_masks()
    return {**found, "twice": twice()}


class Skipped(Split):
    """A break in a loop, so that PyTorch gives up on the forward and compiles what it calls one by one."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def broken_lookups() -> list[str]:
    """What is said where graphs end between a lookup in rows and its sum; then the model runs plainly."""
    by_hook, by_loop = Split(101), Skipped(101)
    by_hook.embed.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return list(map(broken_lookup, (by_hook, by_loop)))


def broken_lookup(model: nn.Module) -> str:
    """What is said of a model once its embedding is split by rows."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
    how = {**HOW, "memory_limit": "100%", "across_ranks": False, "graph_breaks": "plan"}
    try:
        hybridremat.wrap(model, kwargs=texts(0, 0), **how)
    except hybridremat.CaptureError as error:
        model(**texts(0, 0)).backward()
        return str(error)
    return "it was planned"


def behind_a_collective() -> bool:
    """Whether a layer trains as plainly that is wrapped alone, behind a collective of eager code."""
    plain, model = WAYS["words in rows"](), WAYS["words in rows"]()
    x = torch.randn(4, 48, 32, requires_grad=True)
    hybridremat.wrap(model.layers[0], (x,), memory_limit="100%", across_ranks=False, **HOW)
    made, _ = trained(Case(Split), model, 0)
    return all(map(torch.equal, made, trained(Case(Split), plain, 0)[0]))


def late() -> list[bool]:
    """What becomes of inputs that still arrive, and of those beside them."""
    x = torch.randn(2, 3, requires_grad=True)
    pending = all_gather_tensor_autograd(x, 0, distributed.group.WORLD)
    given = (pending, [pending], {"losses": []})
    there, (again,), beside = arrived(given)
    there.sum().backward()
    plainly = type(there) is torch.Tensor and isinstance(pending, AsyncCollectiveTensor)
    return [plainly, there is again, beside is given[2], x.grad is not None]


def left_masks() -> list[tuple[str, bool]]:
    """After an error behind a lookup in rows: what comes of the error, and whether the mask is left."""
    weight = (model := WAYS["words in rows"]()).embed.weight
    tokens = DTensor.from_local(torch.zeros(2, 3, dtype=torch.long), weight.device_mesh, [Replicate()])
    ours = TorchDynamoException()
    ours.__cause__ = hybridremat.LimitError("ours, as Dynamo hands it over")
    found = []
    for error in (RuntimeError(), KeyboardInterrupt(), TorchDynamoException(), ours):
        with pytest.raises((Exception, KeyboardInterrupt)) as raised, whole_lookups(model):
            functional.embedding(tokens, weight)  # the sum of the ranks' results is never asked for
            raise error
        found.append((raised.type.__name__, bool(empty_masks())))
    return found


def columns_by_units(rank: int) -> bool:
    """Whether a model is planned by units that a process trains plainly first: its graphs return a mesh."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    embedding = {"embed": ColwiseParallel(output_layouts=Replicate())}
    model = parallelize_module(split(sequence=False), mesh, embedding)
    case, plain = Case(Split), copy.deepcopy(model)
    expected, _ = trained(case, plain, rank)
    how = {**HOW, "memory_limit": "90%", "across_ranks": False, "units": "layers.*"}
    hybridremat.wrap(model, kwargs=texts(0, 0), **how)
    return all(map(torch.equal, trained(case, model, rank)[0], expected))


def both_ways(_: int) -> dict[str, Any]:
    """A model that is split by tensors over two ranks, and sharded over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sharded", "split"))

    def sharded(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["sharded"])
        return fully_shard(model, mesh=mesh["sharded"])

    case = Case(Split)
    plain, _ = trained(case, sharded(split(sequence=False, mesh=mesh["split"])), 0)
    model = split(sequence=False, mesh=mesh["split"])
    how = {**HOW, "across_ranks": False, "memory_limit": "60%", "fsdp": 2}
    hybridremat.wrap_each(model, "layers.*", kwargs=texts(0, 0), **how)
    plan = hybridremat.get_plan(model)
    made, peaks = trained(case, sharded(model), 0)
    equal = all(map(torch.equal, made, plain))
    return {"equal": equal, "peaks": peaks, "predicted": plan.predicted_peak, "limit": plan.memory_limit}


def twice() -> list[str]:
    """What the checker says of emitted graphs: as they are, and with a collective that runs twice."""
    step = traced(split(sequence=False), **texts(0, 0))
    return [said_of(step, ""), said_of(step, "_c10d_functional")]


def said_of(step: TracedStep, name: str) -> str:
    """What the checker says of a plain step; with a name, the first op of it runs twice."""
    graphs = emit(step, plain_schedule(step.graph))
    again = (node for graph in graphs for node in graph.graph.nodes if name in str(node.target))
    if name:
        node = next(again)
        wait = next(iter(node.users))
        with node.graph.inserting_after(wait):
            copy = node.graph.node_copy(node, lambda source: source)
        with node.graph.inserting_after(copy):
            node.graph.node_copy(wait, {node: copy}.__getitem__)
    return refused_as(step, graphs)


def said_of_late_wait(step: TracedStep) -> str:
    """What the checker says where another op runs before the first wait for a collective of the backward."""
    graphs = emit(step, plain_schedule(step.graph))
    wait = next(node for node in graphs[1].graph.nodes if "wait_tensor" in str(node.target))
    wait.next.append(wait)
    return refused_as(step, graphs)


def refused_as(step: TracedStep, graphs: tuple[fx.GraphModule, fx.GraphModule]) -> str:
    """What the checker says of emitted graphs, or nothing."""
    try:
        check(step, *graphs)
    except hybridremat.PlanError as error:
        return str(error)
    return ""

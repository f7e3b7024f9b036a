"""Small models, a training loop, and a measurement of memory that shares no code with the product's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import capture, compile_step
from hybridremat.graph.costs.cost_models import FlopsCost, with_footprints, with_times
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.garbage import collector_off
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.rewrites.in_place import IN_PLACE
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.pipeline import PlannedPartition

torch.set_num_threads(1)


class Mlp(nn.Module):
    """Wide enough that activations outweigh parameters."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = functional.gelu(layer(x)) * 1.5
        return x.pow(2).mean()


class ConvNet(nn.Module):
    """BatchNorm in training mode, residuals, dropout; the loss inside, beside the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, x, labels):
        x = functional.relu(self.norms[0](self.convs[0](x)))
        for conv, norm in zip(self.convs[1:], self.norms[1:], strict=True):
            x = x + self.dropout(functional.relu(norm(conv(x))))
        scores = self.head(x.mean((2, 3)))
        return functional.cross_entropy(scores, labels), scores


class Block(nn.Module):
    """A Transformer block by hand: attention with dropout on its weights, a causal mask, two residuals."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        parts = self.joined(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        weights = torch.softmax(scores.masked_fill(mask, float("-inf")), -1)
        weights = functional.dropout(weights, self.dropout, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        wide = functional.dropout(functional.gelu(self.wide(self.second(x))), self.dropout, self.training)
        return x + self.narrow(wide)


class Transformer(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens):
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        scores = self.head(x)
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()), "scores": scores}


class Running(nn.Module):
    """Reads a buffer before it is updated and after, and uses one BatchNorm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("ema", torch.ones(16))

    def forward(self, x):
        x = torch.sin(self.first(x) + self.ema)
        with torch.no_grad():
            self.ema.mul_(0.9).add_(x.mean(0), alpha=0.1)
        x = self.norm(torch.tanh(x)) * self.ema
        return self.norm(self.second(x)).cos().mean()


SMALL = {
    "mlp": (Mlp, lambda: {"x": torch.randn(64, 32)}),
    "convnet": (ConvNet, lambda: {"x": torch.randn(4, 3, 12, 12), "labels": torch.randint(0, 5, (4,))}),
    "transformer": (Transformer, lambda: {"tokens": torch.randint(0, 50, (2, 24))}),
    "running": (Running, lambda: {"x": torch.randn(32, 16)}),
}


def small(name):
    """A model in training mode and its batch, the same in every call."""
    torch.manual_seed(0)
    make, draw = SMALL[name]
    model = make()
    return model, draw()


def loss_in(output):
    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "loss"):
        return output.loss
    return output["loss"] if isinstance(output, dict) else output[0]


@dataclass
class Trained:
    """Everything that a few training steps made; ``peaks`` are bytes, one for each step."""

    tensors: dict[str, torch.Tensor]
    peaks: list[int] = field(default_factory=list)

    def differences(self, other: Trained) -> list[str]:
        """Names of tensors that are not equal bit for bit."""
        assert self.tensors.keys() == other.tensors.keys()
        return [name for name, tensor in self.tensors.items() if not torch.equal(tensor, other.tensors[name])]


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Fills the list with signed bytes that were allocated and freed meanwhile, in the order of time."""
    sizes: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield sizes
    records = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag.name == "Allocation":
            records.append((event.start_time_ns, event.extra_fields.alloc_size))
    sizes += [size for _, size in sorted(records, key=lambda record: record[0])]


def allocations(run) -> list[int]:
    """Signed bytes that a call allocated and freed, in the order of time."""
    with recorded() as sizes:
        run()
    return sizes


def allocated_peak(run, device="cpu") -> int:
    """Most bytes that a call had allocated at one time; on CUDA by the counters of its allocator."""
    with collector_off():  # what only a cycle holds must not be freed meanwhile
        if device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            return torch.cuda.max_memory_allocated() - before
        return max(accumulate(allocations(run)), default=0)


def train(model, batch, *, steps=3, measure=True, loss_in=loss_in, seed=1, between=lambda: None) -> Trained:
    """Train with AdamW; every loss, gradient, buffer, parameter and optimizer state is kept."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = next(model.parameters()).device.type
    result = Trained({})
    torch.manual_seed(seed)
    numpy.random.seed(seed)  # transformers' audio models draw what they mask from it
    for step in range(steps):
        optimizer.zero_grad()

        def run(step=step):
            loss = loss_in(model(**batch))
            loss.backward()
            result.tensors[f"loss {step}"] = loss.detach()

        if measure:
            result.peaks.append(allocated_peak(run, device))
        else:
            run()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                result.tensors[f"gradient {step} {name}"] = parameter.grad.clone()
        optimizer.step()
        for name, buffer in model.named_buffers():
            result.tensors[f"buffer {step} {name}"] = buffer.clone()
        between()
    result.tensors |= {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    result.tensors["generator"] = (torch.cuda if device == "cuda" else torch).get_rng_state()
    for index, state in optimizer.state_dict()["state"].items():
        result.tensors |= {f"optimizer {index} {key}": torch.as_tensor(item) for key, item in state.items()}
    return result


def train_plain(model, batch, **how) -> Trained:
    """Train a copy."""
    return train(copy.deepcopy(model), batch, **how)


def with_costs(step, model, store, progress=lambda done, total: None, untried="error"):
    """The same step with times, temporaries, the real sizes of its values and, op by op, in-place forms."""
    sized = with_footprints(step, store, untried)
    return with_times(sized if step.fused_ops else IN_PLACE.applied(sized, store), model, store, progress)


class FixedPlanner:
    """Hands out one schedule (the plain one at first) and keeps the traced step."""

    def __init__(self, untried="error") -> None:
        self.step = self.schedule = None
        self.untried = untried

    def choose(self, step):
        self.step = with_costs(step, FlopsCost(), KernelStore(), untried=self.untried)
        return Chosen(self.step, self.schedule or plain_schedule(self.step.graph), accept=self.accept)

    def accept(self, memory):
        self.peak = memory.peak


def traced(model, *args, hold_outputs=False, fused=False, untried="error", regather=False, **kwargs):
    """The traced step of a model with flops costs, ``fused`` as for Inductor; nothing runs."""
    planner, inductor = FixedPlanner(untried), None
    if fused:
        from hybridremat.compiler.inductor import Inductor  # takes a second

        inductor = Inductor("")
    partition = PlannedPartition(planner.choose, inductor, regather=regather)
    backend = Backend(partition, hold_outputs=hold_outputs)
    capture(model, compile_step(model, backend), backend, args, kwargs).plan()
    return planner.step

"""Small modules, each put together in a way of its own: several inputs and outputs, shared parts, own ops."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

WIDTH = 32


def block(width: int = WIDTH) -> nn.Sequential:
    """LayerNorm and an MLP."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


class Tied(nn.Module):
    """One embedding at both ends, one block called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.block = block()
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.block(x)
        x = x + self.block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class SharedAcrossTowers(nn.Module):
    """Two inputs through one encoder, and each through a tower of its own; a contrastive loss and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, WIDTH), block(), block())
        self.left, self.right = block(), block()

    def forward(self, left, right, weight):
        a = self.left(self.encoder(left)).mean(1)
        b = self.right(self.encoder(right)).mean(1)
        scores = functional.normalize(a, dim=-1) @ functional.normalize(b, dim=-1).T
        labels = torch.arange(len(scores), device=scores.device)
        loss = functional.cross_entropy(scores * weight, labels, label_smoothing=0.1)
        return {"loss": loss, "scores": scores, "features": (a, b)}


class SeveralOutputs(nn.Module):
    """A trunk with three heads; nothing says which of them a loss will use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, WIDTH), block(), nn.Dropout(0.1), block())
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 8) for name in ("first", "second", "third")})

    def forward(self, x):
        x = self.trunk(x)
        return tuple(head(x) for head in self.heads.values())


class TwoLosses(nn.Module):
    """Two scalar losses that the caller adds, a metric as a number, and scores that nobody differentiates."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, WIDTH), block(), block())
        self.head, self.value = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 1)

    def forward(self, x, labels):
        x = self.trunk(x)
        scores = self.head(x)
        first = functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        with torch.no_grad():
            right = (scores.argmax(-1) == labels).float().mean()
        return first, self.value(x).pow(2).mean(), right, scores


class StopsGradients(nn.Module):
    """Parts under no_grad, detached targets, and a branch that takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = nn.Sequential(nn.Linear(16, WIDTH), block()), block()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        seen = self.online(x)
        with torch.no_grad():
            target = self.online(x.flip(1)) + self.unused(seen)
        guess = self.predictor(seen)
        baseline = seen.detach().tanh()
        return (guess - target).pow(2).mean() + (guess * baseline).mean()


class Teacher(nn.Module):
    """A teacher, kept as a moving average of the student and updated inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, WIDTH), block(), block())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, x, other):
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.lerp_(new, 0.1)
            self.steps += 1
            target = (self.teacher(other) - self.center).softmax(-1)
            self.center.mul_(0.9).add_(target.mean((0, 1)), alpha=0.1)
        return -(target * self.student(x).log_softmax(-1)).sum(-1).mean()


class Buffers(nn.Module):
    """Buffers that the forward overwrites, counts in, and reads: BatchNorm, a code book, a queue of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8)
        self.register_buffer("codes", torch.randn(12, WIDTH))
        self.register_buffer("counts", torch.ones(12))
        self.register_buffer("queue", torch.randn(64, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        nearest = torch.cdist(x, self.codes).argmin(-1)
        code = self.codes[nearest]
        with torch.no_grad():
            chosen = functional.one_hot(nearest, 12).float()
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.copy_(torch.lerp(self.codes, chosen.T @ x / self.counts[:, None], 0.1))
        keys = self.last(x + (code - x).detach())
        scores = keys @ self.queue.clone().T  # the backward reads what the next lines overwrite
        with torch.no_grad():
            self.queue[: len(keys)] = keys
            self.place.add_(len(keys)).remainder_(64)
        return scores.logsumexp(-1).mean() + (x - code).pow(2).mean()


class Nested(nn.Module):
    """Containers in containers, parameters in lists and dicts, a hook, modules reached by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleDict({"wide": block(), "gate": nn.Linear(32, 32)}) for _ in "ab")
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in self.stages)
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(WIDTH))})
        self.stages[0]["gate"].register_forward_hook(lambda module, args, output: output * 0.5)

    def forward(self, x):
        for stage, scale in zip(self.stages, self.scales, strict=True):
            x = x + stage["wide"](x) * scale * torch.sigmoid(stage["gate"](x))
        return (x + self.named["shift"]).pow(2).mean()


@dataclass
class Sample:
    """What a data loader may hand over."""

    values: torch.Tensor
    mask: torch.Tensor | None = None


@dataclass
class Result:
    """What a model may return."""

    loss: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    scores: torch.Tensor | None = None


class Structured(nn.Module):
    """A dataclass, a dict and a tuple in, keywords only; a dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.blocks = nn.Linear(16, WIDTH), nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, *, sample, extra, pair, flag=True):
        x = self.inner(sample.values) + extra["shift"] * pair[1]
        if sample.mask is not None:
            x = x * sample.mask[..., None]
        hidden = []
        for inner in self.blocks:
            x = x + inner(x)
            hidden.append(x)
        scores = self.head(x)
        loss = functional.cross_entropy(scores.flatten(0, 1), pair[0].flatten())
        return Result(loss, tuple(hidden), scores if flag else None)


class Unrolled(nn.Module):
    """An LSTM written out, step by step."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.given, self.before = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, 40)

    def forward(self, tokens):
        inputs = self.given(self.embedding(tokens))
        state = memory = inputs.new_zeros(len(tokens), inputs.shape[-1] // 4)
        states = []
        for now in inputs.unbind(1):
            gates = now + self.before(state)
            enter, forget, output, new = gates.chunk(4, -1)
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(output) * torch.tanh(memory)
            states.append(state)
        scores = self.head(torch.stack(states, 1)[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

"""Small modules, each put together in a way of its own: several inputs and outputs, shared parts, own ops."""

from __future__ import annotations

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
        self.encoder = nn.Sequential(nn.Linear(16, WIDTH), block())
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

"""Modules with parts that no gradient reaches, and with buffers that the forward overwrites."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from support.compat.wiring_nets import WIDTH, block


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

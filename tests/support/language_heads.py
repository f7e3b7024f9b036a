"""A small language model, with whatever may lie between its logits and its loss."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

CLASSES, WIDTH = 500, 16


class Head(nn.Module):
    """A small language model; ``how`` names what lies between its product and its loss."""

    def __init__(self, *how, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.how = set(how)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias="bias" in how)
        if "tied" in how:
            self.head.weight = self.embed.weight
        self.weights = nn.Buffer(torch.rand(CLASSES) if "weights" in how else torch.ones(CLASSES))
        if "offset" in how:
            self.offset = nn.Parameter(torch.randn(1, 1, CLASSES))
        self.to(dtype)

    def logits(self, hidden):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in self.how):
            logits = self.head(hidden)
        logits = logits.float() if "float" in self.how else logits
        logits = logits * 0.3 if "scaled" in self.how else logits
        logits = 5 * torch.tanh(logits / 5) if "capped" in self.how else logits
        logits = logits.clamp(-0.5, 0.5) if "clamped" in self.how else logits
        return logits + self.offset if "offset" in self.how else logits

    def loss(self, logits, labels):
        how = {"reduction": "sum" if "sum" in self.how else "mean"}
        how["label_smoothing"] = 0.1 if "smooth" in self.how else 0.0
        how["weight"] = self.weights if "weights" in self.how else None
        loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=3, **how)
        if "means" in self.how:
            hits = (logits.argmax(-1) == labels).sum()
            loss = loss + 0.1 * logits.mean() + logits.pow(2).mean((0, 1)).sum(dim=None) / CLASSES + 0 * hits
        return loss + 1e-2 * logits.logsumexp(-1).square().mean() if "z" in self.how else loss

    def forward(self, tokens, labels):
        logits = self.logits(torch.tanh(self.body(self.embed(tokens))))
        if "shifted" in self.how:
            return self.loss(logits[:, :-1].contiguous(), labels[:, 1:])
        if "padded" in self.how:
            labels = functional.pad(labels, (0, 1), value=3)[:, 1:].contiguous()
        return self.loss(logits, labels)


def tokens(rows=4, length=37, seed=1):
    drawn = torch.randint(0, CLASSES, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"tokens": drawn, "labels": drawn}


def gradients(model, batch, scale=0.7):
    model.zero_grad()
    loss = model(**batch)
    (loss * scale).backward()
    return {"loss": loss.detach().double()} | {
        name: parameter.grad.double().clone() for name, parameter in model.named_parameters()
    }


def reference(model, batch):
    exact = copy.deepcopy(model).double()
    exact.how -= {"autocast", "float"}
    return gradients(exact, batch)


KINDS = [
    (),
    ("bias",),
    ("tied",),
    ("autocast", "float", "bias"),
    ("scaled", "capped", "z"),
    ("shifted", "smooth"),
    ("padded", "sum"),
    ("weights", "shifted", "scaled"),
    ("weights", "smooth", "offset"),
    ("shifted", "smooth", "bias"),
    ("means", "clamped"),
    ("autocast", "float", "capped", "shifted", "scaled"),
]

"""TRL's fused head as one op, against itself in plain training: masks, tied and frozen weights, autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hybridremat
from support.training import train, train_plain

HOW = {"cost_model": "flops", "workers": 1, "progress": False}
WORDS, WIDTH = 100, 16
CASES = {
    "plain": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "bias": {"bias": True},
    "autocast": {"cast": True},
}


class Headed(nn.Module):
    """An embedding, a layer, and TRL's head in tiles of 64 words; the entropy is part of the loss."""

    def __init__(self, *, tied=False, frozen=False, bias=False, cast=False) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.cast = nn.Linear(WIDTH, WORDS, bias=bias), cast
        if tied:
            self.out.weight = self.words.weight
        self.out.weight.requires_grad_(not frozen)

    def forward(self, tokens, labels):
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
            hidden = torch.relu(self.layer(self.words(tokens))).flatten(0, 1)
            mask, targets = (labels != -100).flatten(), labels.clamp(min=0).flatten()
            head = hidden, self.out.weight, self.out.bias
            found = ChunkedLogProbFunction.apply(*head, targets, 0.9, 64, None, 1.0, ("entropy", "is_top1"))
            return 0.1 * found[1].mean() - found[0].masked_fill(~mask, 0).sum() / mask.sum()


@pytest.mark.compat
@pytest.mark.parametrize("name", CASES)
def test_a_head_of_trl_trains_with_the_same_bits(name):
    pytest.importorskip("trl.kernels.chunked_logprob")
    torch.manual_seed(0)
    labels = torch.randint(0, WORDS, (8, 16))
    labels[:, :5] = -100
    model, batch = Headed(**CASES[name]), {"tokens": torch.randint(0, WORDS, (8, 16)), "labels": labels}
    plain = copy.deepcopy(model)
    expected = train_plain(model, batch)
    least = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW).least_peak
    planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=least, **HOW)
    for each in (plain, planned):
        loss = each(**batch)
        loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    assert all(one.grad is other.grad is None or torch.equal(one.grad, other.grad) for one, other in pairs)
    trained = train(hybridremat.wrap(model, kwargs=batch, memory_limit=least, **HOW), batch)
    assert expected.differences(trained) == []
    assert max(trained.peaks) <= least

"""Built-in models whose values wait in a file: plain training bit for bit, in the bytes that were told."""

from __future__ import annotations

import copy

import pytest
import torch

import hybridremat
from hybridremat.zoo.models import reference_model
from support.training import train, train_plain
from support.wrapping import HOW

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

# What is changed, dropout, shares of the plain peak: what gradients of parameters alone take is below these.
MODELS = {
    "gpt2": ({"n_layer": 3}, 0.1, (0.6, 0.35)),
    "llama": ({"num_hidden_layers": 2}, 0.0, (0.6, 0.45)),
    "bert": ({"num_hidden_layers": 2}, 0.1, (0.6, 0.45)),
    "t5": ({"num_layers": 1, "num_decoder_layers": 1}, 0.1, (0.7, 0.5)),
    "vit": ({"num_hidden_layers": 3}, 0.1, (0.7, 0.5)),
    "resnet50": ({"pixels": 64}, 0.0, (0.85,)),
    "unet": ({"pixels": 64, "depth": 3, "base": 16}, 0.0, (0.7,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_equal(name, tmp_path):
    changes, dropout, shares = MODELS[name]
    torch.manual_seed(0)
    model, batch = reference_model(name, dropout, changes)
    model.train()
    plain = train_plain(model, batch)
    moved = 0
    for share in shares:
        planned = hybridremat.wrap(
            copy.deepcopy(model), kwargs=batch, memory_limit=f"{share:.0%}", offload=f"file:{tmp_path}", **HOW
        )
        plan = hybridremat.get_plan(planned)
        moved += len(plan.schedule.moves)
        trained = train(planned, batch)
        assert plain.differences(trained) == [], share
        assert {*trained.peaks} == {plan.predicted_peak} and plan.predicted_peak <= plan.memory_limit, share
    assert moved

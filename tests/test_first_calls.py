"""What a model sets up in its first call, and Dynamo cannot trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import hybridremat
from support.training import train

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def router():
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2, output_router_logits=True)), {}


def hidden_states():
    return LlamaForCausalLM(LlamaConfig(**SMALL)), {"output_hidden_states": True}


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (hidden_states, {}),
        pytest.param(hidden_states, {"graph_breaks": "plan"}, marks=pytest.mark.slow),
        pytest.param(router, {}, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_has_never_run_and_captures_outputs_is_planned(make, how):
    torch.manual_seed(0)
    model, asked = make()
    plain = copy.deepcopy(model)
    tokens = torch.randint(0, 32, (2, 8))
    batch = {"input_ids": tokens, "labels": tokens, **asked}
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", cost_model="flops", progress=False, **how)
    plan = hybridremat.get_plan(model)
    assert not plan.breaks and not plan.parts, "one graph"
    assert train(plain, batch).differences(train(model, batch)) == []


def test_the_hooks_are_those_of_a_first_call():
    models = [hidden_states()[0] for _ in range(2)]
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "output_hidden_states": True}
    models[0](**batch)
    hybridremat.plan(
        models[1],
        kwargs={**batch, "labels": batch["input_ids"]},
        memory_limit="100%",
        cost_model="flops",
        progress=False,
    )
    hooked = [[name for name, m in model.named_modules() if m._forward_hooks] for model in models]
    assert hooked[0] == hooked[1] != []


class Replacing(nn.Module):
    """Puts another layer into itself when it first meets a short input, which no capture follows."""

    def __init__(self):
        super().__init__()
        self.layer, self.head, self.replaced = nn.Linear(8, 8, bias=False), nn.Linear(8, 1), False

    def forward(self, x):
        if not self.replaced and x.shape[1] < 16:
            self.replace()
        return self.head(self.layer(x).tanh()).sum()

    def replace(self):
        self.replaced, weight = True, self.layer.weight
        self.layer = nn.Linear(8, 8)
        self.layer.weight = weight


def test_a_first_call_may_put_other_layers_into_the_model():
    torch.manual_seed(0)
    model, batch = Replacing(), {"x": torch.randn(2, 8, 8)}
    plain = copy.deepcopy(model)
    plain.replace()
    how = {"memory_limit": "100%", "cost_model": "flops", "progress": False, "graph_breaks": "plan"}
    hybridremat.wrap(model, kwargs=batch, **how)
    plain.layer.load_state_dict(model.layer.state_dict())
    assert train(plain, batch).differences(train(model, batch)) == []

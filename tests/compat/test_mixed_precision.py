"""Mixed precision over the whole compatibility table: every kernel is tried, and least limits are kept."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import hybridremat
from hybridremat.graph.costs.cost_models import with_footprints
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import distinct_kernels
from support.compat import cases_language, cases_vision, cases_wiring
from support.compat.harness import HOW
from support.compat.vision_models import hugging_face
from support.op_classes import Under
from support.training import traced, train

CASES = [*cases_language.CASES, *cases_vision.CASES, *cases_wiring.CASES]
RESNET = {"layer_type": "basic", "depths": [2, 2, 2, 2]}
VIT = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
GPT2 = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 300, "n_positions": 64}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, GPT2["vocab_size"], (2, 48))
    config = GPT2Config(**GPT2, use_cache=False, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # named, no log line breaks the graph of the reference
    return model, {"input_ids": tokens, "labels": tokens}


LEAST = {
    "GPT-2": gpt2,
    "ResNet": partial(hugging_face, "ResNet", 4, 64, **RESNET),
    "ViT": partial(hugging_face, "ViT", 4, 32, image_size=32, patch_size=8, **VIT),
}


@pytest.mark.compat
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_kernel_is_left_untried(case):
    model, batch = case.fresh()
    step = traced(Under(model), **batch)
    store = KernelStore()
    with_footprints(step, store)
    kernels = distinct_kernels(step)
    assert [key for key in kernels.node_of if store.temporaries.get(key) is None] == []


@pytest.mark.compat
@pytest.mark.parametrize("name", LEAST)
def test_a_least_limit_is_kept_under_autocast(name):
    torch.manual_seed(0)
    model, batch = LEAST[name]()
    model = Under(model.train())  # around a whole loop, autocast would keep the weights of the first step
    least = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW).least_peak
    planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=least, **HOW)
    trained = train(planned, batch)
    if name == "GPT-2":  # AOTAutograd changes the arithmetic of this model's backward in bfloat16
        model.compile(backend="aot_eager", dynamic=False)
    expected = train(model, batch)
    assert expected.differences(trained) == []
    assert max(trained.peaks) <= least, (trained.peaks, least)

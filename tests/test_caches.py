"""Key/value caches of transformers models: off in planned steps, there for everything else."""

from __future__ import annotations

import copy

import pytest
import torch

import hybridremat
from support.training import train, train_plain

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


@pytest.fixture(scope="module")
def pair():
    """A wrapped model whose configuration asks for caches, a plain copy, and a batch."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, n_positions=64, vocab_size=64, bos_token_id=0, eos_token_id=None
    )
    assert config.use_cache is True
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, 64, (2, 32))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    plain = copy.deepcopy(model)
    return hybridremat.wrap(model, kwargs=batch, memory_limit="80%", **HOW), plain, batch


def test_training_makes_no_cache_and_the_setting_comes_back(pair):
    model, _, batch = pair
    assert model(**batch).past_key_values is None
    assert model.config.use_cache is True


def test_training_is_that_of_a_model_without_caches(pair):
    """Not that of one with them: those copy keys and values into a layout that products round otherwise."""
    _, plain, batch = pair
    model = hybridremat.wrap(copy.deepcopy(plain), kwargs=batch, memory_limit="80%", **HOW)
    plain = copy.deepcopy(plain)
    plain.config.use_cache = False
    expected, trained = train_plain(plain, batch), train(model, batch)
    assert expected.differences(trained) == []
    assert max(trained.peaks) <= hybridremat.get_plan(model).memory_limit


def test_the_setting_comes_back_when_a_step_fails(pair):
    model, _, batch = pair
    with pytest.raises(ValueError, match="batch_size"):  # as of the plain model
        model(**batch | {"labels": torch.zeros(3, 5, dtype=torch.long)})
    assert model.config.use_cache is True


def test_evaluation_and_generation_use_caches(pair):
    model, plain, batch = pair
    model.eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert model(**batch).past_key_values is not None
    prompt = batch["input_ids"][:, :5]
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **how), plain.eval().generate(prompt, **how))
    model.train()
    assert model(**batch).past_key_values is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_hook_for_checkpoints_of_frozen_embeddings_breaks_no_graph(reentrant):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, use_cache=False, **sizes))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).train()
    model.enable_input_require_grads()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    tokens = torch.randint(0, 32, (2, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda *_: None)
    plain, before = copy.deepcopy(model), list(embeddings._forward_hooks.items())
    hybridremat.wrap(model, kwargs=batch, memory_limit="70%", graph_breaks="error", **HOW)
    assert train_plain(plain, batch).differences(train(model, batch)) == []
    assert list(embeddings._forward_hooks.items()) == before

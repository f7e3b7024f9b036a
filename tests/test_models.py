"""Real architectures at three limits: bit for bit the numbers of plain training, in the memory promised."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import hybridremat
from hybridremat.zoo.models import reference_model
from hybridremat.zoo.unet import UNet
from support.training import train, train_plain

transformers = pytest.importorskip("transformers")

HOW = {"cost_model": "flops", "workers": 1, "progress": False}
WIDTH, WORDS, CLASSES = 256, 4096, 10


def words(batch=2, length=128):
    drawn = torch.randint(0, WORDS, (batch, length))
    return {"input_ids": drawn, "labels": drawn.clone()}


def images(batch=2, pixels=64):
    drawn = torch.randn(batch, 3, pixels, pixels)
    return {"pixel_values": drawn, "labels": torch.randint(0, CLASSES, (batch,))}


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=4, n_positions=128, vocab_size=WORDS, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1
    return transformers.GPT2LMHeadModel(config), words()


def bert():
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=WIDTH, num_attention_heads=4, intermediate_size=4 * WIDTH,
        vocab_size=WORDS,
    )  # fmt: skip
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.1
    return transformers.BertForMaskedLM(config), words()


def llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=704, vocab_size=WORDS, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), words()


def vit():
    config = transformers.ViTConfig(
        num_hidden_layers=3, hidden_size=192, num_attention_heads=3, intermediate_size=768, image_size=160,
        num_labels=CLASSES, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), images(batch=4, pixels=160)


def resnet18():
    config = transformers.ResNetConfig(
        layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], num_labels=CLASSES
    )
    return transformers.ResNetForImageClassification(config), images(batch=8, pixels=128)


def small_resnet():
    config = transformers.ResNetConfig(
        layer_type="basic", depths=[1, 1, 1], hidden_sizes=[16, 32, 64], embedding_size=16, num_labels=CLASSES
    )
    return transformers.ResNetForImageClassification(config), images(batch=8)


def unet():
    return UNet(), {"x": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 2, (4, 64, 64))}


MODELS = {make.__name__: make for make in (gpt2, bert, llama, vit, small_resnet, resnet18, unet)}
EVERYDAY = ("small_resnet",)
IN_FULL = (pytest.mark.slow, pytest.mark.full_effort)
MODELS["gpt2 in full"] = partial(reference_model, "gpt2", 0.1)
MODELS["resnet50 in full"] = partial(reference_model, "resnet50")


def limits_of(name, model, batch):
    """80 % of the plain step, half-way to the least feasible limit, and that limit, in bytes.

    Of models of full size the second alone: the whole frontier is planned for the least of them.
    """
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW)
    least, plain = plan.least_peak, plan.plain_peak
    easy = plain * 8 // 10
    if easy < least:  # a small batch under many parameters: their gradients are most of the memory
        easy = (plain + least) // 2
    limits = {"80 %": easy, "half-way": (easy + least) // 2, "least": least}
    return {"half-way": limits["half-way"]} if name.endswith("in full") else limits


@pytest.mark.everyday
@pytest.mark.parametrize("name", [n if n in EVERYDAY else pytest.param(n, marks=IN_FULL) for n in MODELS])
def test_training_is_bit_equal_in_the_memory_that_was_promised(name):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    plain = train_plain(model, batch)
    for share, limit in limits_of(name, model, batch).items():
        planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=limit, **HOW)
        plan = hybridremat.get_plan(planned)
        trained = train(planned, batch)
        assert plain.differences(trained) == [], share
        assert max(trained.peaks) <= limit, share
        assert all(abs(peak - plan.predicted_peak) <= 0.001 * peak for peak in trained.peaks), share
        assert limit < plan.plain_peak and (share != "least" or limit <= 1.01 * plan.predicted_peak)

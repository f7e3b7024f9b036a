"""``--set``: fields of built-in models, arguments of a user's function, and what is refused."""

import json

import pytest
import torch

from hybridremat.cli import main as cli
from hybridremat.cli.inputs import parse_sets
from hybridremat.cli.targets import load_target
from hybridremat.errors import TargetError
from hybridremat.zoo.models import REFERENCE_MODELS, reference_model
from hybridremat.zoo.recipes import RECIPES
from support.command_line import QUICK, failed


def made(name: str, *sets: str, **how):
    return load_target(name, changes=parse_sets(sets), **how)


VALUES = {"24": 24, "0.5": 0.5, "True": True, "None": None, "[1, 2]": [1, 2], "gelu": "gelu", "": ""}


@pytest.mark.parametrize(("text", "value"), VALUES.items())
def test_values_are_literals_or_text(text, value):
    assert parse_sets([f"key={text}", "other=a=b"]) == {"key": value, "other": "a=b"}


def test_what_is_no_key_and_value_is_refused():
    for sets, message in ((["n_layer"], "KEY=VALUE"), (["=3"], "KEY=VALUE"), (["a=1", "a=2"], "twice")):
        with pytest.raises(TargetError, match=message):
            parse_sets(sets)


@pytest.mark.parametrize(
    ("name", "sets", "fields"),
    [
        ("gpt2", ["n_layer=2", "n_embd=64"], {"n_layer": 2, "n_embd": 64, "n_head": 4}),
        ("gpt2", ["num_hidden_layers=1", "hidden_size=32"], {"n_layer": 1, "n_embd": 32}),
        ("llama", ["num_hidden_layers=1", "num_key_value_heads=2"], {"num_key_value_heads": 2}),
        ("bert", ["num_hidden_layers=1", "hidden_act=relu"], {"hidden_act": "relu"}),
        ("t5", ["num_layers=1", "num_decoder_layers=1", "d_ff=64"], {"d_ff": 64}),
        ("vit", ["num_hidden_layers=1", "num_labels=3"], {"num_labels": 3}),
        ("resnet50", ["depths=[1, 1, 1, 1]", "num_channels=1"], {"depths": [1, 1, 1, 1]}),
    ],
)
def test_fields_of_the_config(name, sets, fields):
    config = made(name, *sets).model.config
    assert {key: getattr(config, key) for key in fields} == fields


@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_the_batch(name):
    size = "length" if name in RECIPES and "length" in RECIPES[name].shape else "pixels"
    batch = made(name, "batch=3", f"{size}=64", *(["base=4"] if name == "unet" else [])).kwargs
    first, labels = batch.values()
    assert first.shape[0] == labels.shape[0] == 3
    assert first.shape[-1] == 64


def test_inputs_and_their_reach_follow_one_another():
    assert made("gpt2", "length=1024", "n_layer=1").model.config.n_positions == 1024
    assert made("gpt2", "n_positions=128", "n_layer=1").kwargs["input_ids"].shape == (2, 128)
    assert made("gpt2", "n_positions=2048", "length=64", "n_layer=1").model.config.n_positions == 2048
    assert made("vit", "pixels=64", "num_hidden_layers=1").model.config.image_size == 64
    assert made("vit", "image_size=96", "num_hidden_layers=1").kwargs["pixel_values"].shape == (4, 3, 96, 96)
    with pytest.raises(TargetError, match="gpt2 takes n_positions=64; set only one"):
        made("gpt2", "n_positions=64", "length=128")


def test_tokens_and_labels_stay_inside_what_is_set():
    batch = made("gpt2", "vocab_size=7", "n_layer=1").kwargs
    assert 4 <= batch["input_ids"].max() < 7
    assert made("vit", "num_labels=2", "batch=64", "num_hidden_layers=1").kwargs["labels"].max() == 1


def test_dtype_is_that_of_model_and_images():
    target = made("unet", "dtype=bfloat16", "base=4", "pixels=32")
    assert {t.dtype for t in target.model.parameters()} == {target.kwargs["x"].dtype} == {torch.bfloat16}
    assert made("gpt2", "dtype=bfloat16", "n_layer=1").kwargs["labels"].dtype == torch.int64


def test_nothing_set_is_the_model_that_tests_and_benchmarks_know():
    (plain, batch), (other, again) = reference_model("gpt2"), reference_model("gpt2", 0.0, {"n_layer": 6})
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(batch[key], again[key]) for key in batch)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt2", "--set", "n_layr=3"], "no such field; did you mean n_layer"),
        (["gpt2", "--set", "n_layr=3"], "Common ones: batch, length, dtype, n_layer, n_embd, n_head"),
        (["gpt2", "--set", "pixels=3"], "--set pixels: gpt2 has no such field"),
        (["gpt2", "--set", "model_type=bert"], "no such field"),
        (["gpt2", "--set", "n_layer=two"], "n_layer='two' is str; give int, as its default 6 is"),
        (["gpt2", "--set", "n_layer=2.5"], "n_layer=2.5 is float; give int"),
        (["gpt2", "--set", "n_layer=True"], "n_layer=True is bool; give int"),
        (["gpt2", "--set", "n_layer=0"], "n_layer=0: give a whole number of at least 1"),
        (["gpt2", "--set", "batch=-1"], "batch=-1: give a whole number of at least 1"),
        (["gpt2", "--set", "n_embd=255"], "gpt2 cannot be made with n_embd=255: "),
        (["gpt2", "--set", "n_embd=64", "--set", "hidden_size=32"], "the same field as n_embd"),
        (["gpt2", "--set", "dtype=int8"], "give float32, bfloat16, float16"),
        (["bert", "--set", "num_attention_heads=7"], "bert cannot be made with num_attention_heads=7: "),
        (["llama", "--dropout", "0.1"], "llama has no dropout"),
        (["gpt2", "--dropout", "1.5"], "at least 0 and below 1"),
        (["unet", "--set", "width=3"], "Common ones: batch, pixels, base, depth, channels_in, dtype"),
        (["unet", "--set", "pixels=100"], "give a multiple of 16"),
        (["unet", "--set", "base=wide"], "base='wide': give a whole number"),
        (["mymodels.py:make", "--set", "depth=3"], "an argument named depth; it takes layers, rows"),
        (["mymodels.py:make", "--dropout", "0.1"], "should take an argument named dropout; it takes layers"),
        (["mymodels.py:needy"], "mymodels.py:needy needs --set rows=…; it takes rows, layers"),
        (["mymodels.py:wrong", "--set", "x=1"], "it takes no arguments"),
        (["mymodels.py:make", "--set", "layers=many"], "mymodels.py:make failed at "),
    ],
)
def test_what_cannot_be_set_is_told(models, capsys, words, message):
    assert message in failed(capsys, "plan", *words, "--limit", "50%")


def test_arguments_reach_the_users_function(models, capsys):
    words = ["plan", "mymodels.py:needy", "--set", "rows=32", "--set", "layers=2", "--limit", "99%", "--json"]
    assert cli.main([*words, *QUICK]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["origin"]["inputs"][0]["shape"] == [32, 16]
    assert plan["origin"]["parameters"] == 2 * (16 * 16 + 16)


def test_dropout_reaches_a_function_that_takes_it(models, tmp_path):
    code = "from mymodels import make as made\n\ndef make(dropout):\n    return *made(), dropout\n"
    (tmp_path / "drops.py").write_text(code)
    with pytest.raises(TargetError, match=r"it returned \(Net, dict, float\)"):
        load_target("drops.py:make", dropout=0.25)


def test_a_built_in_model_as_it_is_set_is_planned(models, capsys):
    sets = [f"--set={each}" for each in ("n_layer=1", "batch=1", "length=32", "n_embd=32", "vocab_size=64")]
    assert cli.main(["plan", "gpt2", *sets, "--limit", "99%", "--json", *QUICK]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [each["shape"] for each in plan["origin"]["inputs"]] == [[1, 32], [1, 32]]

"""The built-in models are what the recorded frontiers were made with, and the same in every call."""

import csv
import sys
from pathlib import Path

import pytest
import torch

from hybridremat.errors import ModelError
from hybridremat.zoo.models import REFERENCE_MODELS, reference_model

FRONTIERS = Path(__file__).parent.parent / "benchmarks" / "data" / "reference_frontiers.csv"

PARAMETERS = {
    "gpt2": 5_918_720,
    "llama": 6_917_376,
    "bert": 5_989_632,
    "t5": 7_345_920,
    "vit": 5_507_914,
    "resnet50": 23_528_522,
    "unet": 7_763_074,
}
INPUTS = {
    "gpt2": {"input_ids": (2, 512), "labels": (2, 512)},
    "llama": {"input_ids": (2, 512), "labels": (2, 512)},
    "bert": {"input_ids": (2, 512), "labels": (2, 512)},
    "t5": {"input_ids": (2, 256), "labels": (2, 256)},
    "vit": {"pixel_values": (4, 3, 160, 160), "labels": (4,)},
    "resnet50": {"pixel_values": (8, 3, 128, 128), "labels": (8,)},
    "unet": {"x": (4, 3, 128, 128), "labels": (4, 128, 128)},
}


@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_models_and_batches(name):
    model, batch = reference_model(name)
    assert model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert {key: tuple(tensor.shape) for key, tensor in batch.items()} == INPUTS[name]


@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_every_call_gives_the_same(name):
    (first, first_batch), (again, again_batch) = reference_model(name), reference_model(name)
    for tensor, other in zip(first.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, other)
    for key, tensor in first_batch.items():
        assert torch.equal(tensor, again_batch[key])


def test_dropout_reaches_every_dropout_and_draws_no_weights():
    plain, _ = reference_model("bert")
    dropped, _ = reference_model("bert", dropout=0.1)
    rates = [module.p for module in dropped.modules() if isinstance(module, torch.nn.Dropout)]
    assert rates
    assert set(rates) == {0.1}
    for tensor, other in zip(plain.state_dict().values(), dropped.state_dict().values(), strict=True):
        assert torch.equal(tensor, other)


def test_the_unet_learns_from_every_parameter():
    model, _ = reference_model("unet")
    images, labels = torch.randn(1, 3, 32, 32), torch.randint(0, 2, (1, 32, 32))
    model(images, labels).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_recorded_frontiers_belong_to_these_models():
    with FRONTIERS.open(encoding="utf-8") as file:
        names = {row["model"] for row in csv.DictReader(file)}
    assert {name.split("_")[0] for name in names} == set(REFERENCE_MODELS)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelError) as caught:
        reference_model("gpt5")
    assert str(caught.value) == (
        "there is no built-in model 'gpt5'; there are gpt2, llama, bert, t5, vit, resnet50, unet."
    )


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError) as caught:
        reference_model("gpt2")
    assert str(caught.value) == (
        "this built-in model comes from the package transformers, which is not installed: "
        "pip install 'hybridremat[models]'"
    )

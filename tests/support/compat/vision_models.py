"""Image models of transformers, torchvision and timm, with random weights and a batch for each."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from support.compat.vision_nets import ConditionedUNet

CLASSES = 10
Made = tuple[nn.Module, dict[str, Any]]


class Classifier(nn.Module):
    """A net that returns scores, with its loss inside."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images, labels):
        return functional.cross_entropy(self.net(images), labels)


class LossAlone(nn.Module):
    """A model without its scores: the unplanned joint graph would have a gradient for them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **batch):
        return self.net(**batch).loss


def images(batch: int, pixels: int, name: str = "pixel_values") -> dict[str, torch.Tensor]:
    """Images and their classes."""
    return {name: torch.randn(batch, 3, pixels, pixels), "labels": torch.randint(0, CLASSES, (batch,))}


def hugging_face(name: str, batch: int, pixels: int, /, **config: Any) -> Made:
    """An image classifier of transformers."""
    library = importlib.import_module("transformers")
    built = getattr(library, f"{name}Config")(num_labels=CLASSES, **config)
    return getattr(library, f"{name}ForImageClassification")(built), images(batch, pixels)


def torchvision(name: str, batch: int, pixels: int, /, **how: Any) -> Made:
    """A classifier of torchvision."""
    models = importlib.import_module("torchvision.models")
    return Classifier(getattr(models, name)(num_classes=CLASSES, **how)), images(batch, pixels, "images")


def timm(name: str, batch: int, pixels: int, /, **how: Any) -> Made:
    """A classifier of timm."""
    create = importlib.import_module("timm").create_model
    return Classifier(create(name, num_classes=CLASSES, **how)), images(batch, pixels, "images")


def segformer() -> Made:
    """Run once before it is wrapped: the first call hooks the layers whose outputs it needs."""
    library = importlib.import_module("transformers")
    config = library.SegformerConfig(
        num_labels=CLASSES,
        depths=[2, 2, 2, 2],
        hidden_sizes=[16, 32, 64, 128],
        decoder_hidden_size=64,
    )
    model = library.SegformerForSemanticSegmentation(config)
    batch = {**images(2, 64), "labels": torch.randint(0, CLASSES, (2, 64, 64))}
    with torch.no_grad():
        model.eval()(**batch)
    return LossAlone(model.train()), batch


def clip() -> Made:
    library = importlib.import_module("transformers")
    wide = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = library.CLIPConfig(
        text_config={
            **wide,
            "vocab_size": 100,
            "max_position_embeddings": 32,
            "bos_token_id": 98,
            "eos_token_id": 99,
        },
        vision_config={**wide, "image_size": 64, "patch_size": 8},
        projection_dim=32,
    )
    tokens = torch.randint(0, 97, (8, 32))
    lengths = torch.randint(5, 33, (8, 1))
    tokens.scatter_(1, lengths - 1, 99)  # the text tower's output is read at this token
    return library.CLIPModel(config), {
        "input_ids": tokens,
        "pixel_values": torch.randn(8, 3, 64, 64),
        "attention_mask": (torch.arange(32) < lengths).long(),
        "return_loss": True,
    }


def unet(kind: type[nn.Module]) -> Made:
    return kind(base=8, depth=3), {
        "x": torch.randn(4, 3, 48, 48),
        "labels": torch.randint(0, 2, (4, 48, 48)),
    }


def conditioned() -> Made:
    return ConditionedUNet(), {
        "noisy": torch.randn(2, 4, 32, 32),
        "times": torch.randint(0, 1000, (2,)),
        "context": torch.randn(2, 8, 32),
        "noise": torch.randn(2, 4, 32, 32),
    }

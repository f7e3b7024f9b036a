"""Nets for images, each with its own defaults for dropout, drop-path and normalization.

The named architectures keep their depth; widths, images and batches are as small as leaves the activations
larger than the parameters' gradients.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Case
from torch import nn
from torch.nn import functional
from vision_nets import ConditionedUNet, GroupUNet

from hybridremat.unet import UNet

CLASSES = 10
Made = tuple[nn.Module, dict[str, Any]]


class Classifier(nn.Module):
    """A net that returns scores, with its loss inside."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images, labels):
        return functional.cross_entropy(self.net(images), labels)


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
    return model.train(), batch


def clip() -> Made:
    library = importlib.import_module("transformers")
    wide = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = library.CLIPConfig(
        text_config={**wide, "vocab_size": 100, "max_position_embeddings": 32},
        vision_config={**wide, "image_size": 64, "patch_size": 8},
        projection_dim=32,
    )
    tokens = torch.randint(0, 97, (8, 32))
    return library.CLIPModel(config), {
        "input_ids": tokens,
        "pixel_values": torch.randn(8, 3, 64, 64),
        "attention_mask": (torch.arange(32) < torch.randint(5, 33, (8, 1))).long(),
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


VIT = {"hidden_size": 96, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 384}
SWIN = {"embed_dim": 24, "depths": [2, 2, 6, 2], "num_heads": [1, 2, 4, 8], "window_size": 4}
TV = ("torchvision",)
TIMM = ("timm", "torchvision")


def case(name: str, build: Callable[[], Made], **how: Any) -> Case:
    """A line under Vision."""
    return Case("Vision", name, build, **how)


CASES = [
    case("ViT, 12 layers", partial(hugging_face, "ViT", 4, 64, image_size=64, patch_size=8, **VIT)),
    case("DeiT, 12 layers", partial(hugging_face, "DeiT", 4, 64, image_size=64, patch_size=8, **VIT)),
    case("Swin", partial(hugging_face, "Swin", 4, 64, image_size=64, patch_size=2, **SWIN)),
    case(
        "Swin, drop-path 0.2 (timm)",
        partial(timm, "swin_tiny_patch4_window7_224", 2, 56, img_size=56, embed_dim=24, drop_path_rate=0.2),
        needs=TIMM,
    ),
    case(
        "ConvNeXt-tiny",
        partial(hugging_face, "ConvNext", 4, 64, hidden_sizes=[24, 48, 96, 192], drop_path_rate=0.1),
    ),
    case(
        "ConvNeXt-atto, drop-path 0.2 (timm)",
        partial(timm, "convnext_atto", 4, 64, drop_path_rate=0.2),
        needs=TIMM,
    ),
    case(
        "ViT-tiny, drop-path 0.2 (timm)",
        partial(timm, "vit_tiny_patch16_224", 8, 96, img_size=96, drop_path_rate=0.2),
        needs=TIMM,
    ),
    case("ResNet-18 (torchvision)", partial(torchvision, "resnet18", 8, 96), needs=TV),
    case("ResNet-50 (torchvision)", partial(torchvision, "resnet50", 8, 96), needs=TV),
    case("ResNet-101 (torchvision)", partial(torchvision, "resnet101", 8, 96), needs=TV),
    case(
        "ResNet-18",
        partial(
            hugging_face,
            "ResNet",
            8,
            96,
            layer_type="basic",
            depths=[2, 2, 2, 2],
            hidden_sizes=[32, 64, 128, 256],
        ),
    ),
    case("ResNet-50", partial(hugging_face, "ResNet", 8, 96, hidden_sizes=[64, 128, 256, 512])),
    case(
        "ResNet-101",
        partial(hugging_face, "ResNet", 8, 96, depths=[3, 4, 23, 3], hidden_sizes=[64, 128, 256, 512]),
    ),
    case(
        "RegNet-Y",
        partial(
            hugging_face,
            "RegNet",
            8,
            64,
            embedding_size=16,
            hidden_sizes=[24, 56, 152, 368],
            depths=[1, 1, 4, 7],
            groups_width=8,
        ),
    ),
    case("RegNet-Y 400MF (torchvision)", partial(torchvision, "regnet_y_400mf", 8, 96), needs=TV),
    case(
        "EfficientNet-B0",
        partial(
            hugging_face,
            "EfficientNet",
            8,
            64,
            width_coefficient=0.5,
            depth_coefficient=1.0,
            hidden_dim=640,
            image_size=64,
        ),
    ),
    case("EfficientNet-B0 (torchvision)", partial(torchvision, "efficientnet_b0", 8, 96), needs=TV),
    case(
        "EfficientNet-B0, drop-path 0.2 (timm)",
        partial(timm, "efficientnet_b0", 8, 96, drop_path_rate=0.2),
        needs=TIMM,
    ),
    case("DenseNet-121 (torchvision)", partial(torchvision, "densenet121", 4, 96), needs=TV),
    case("MobileNetV3-small (torchvision)", partial(torchvision, "mobilenet_v3_small", 8, 96), needs=TV),
    case(
        "MobileNetV3-large, drop-path 0.2 (timm)",
        partial(timm, "mobilenetv3_large_100", 8, 96, drop_path_rate=0.2),
        needs=TIMM,
    ),
    case(
        "SegFormer",
        segformer,
        reference="joint",
        remark="run once before wrapping; AOTAutograd decomposes bilinear upsampling",
    ),
    case("U-Net, BatchNorm", partial(unet, UNet)),
    case("U-Net, GroupNorm", partial(unet, GroupUNet)),
    case("diffusion U-Net: time embedding, cross-attention", conditioned),
    case("CLIP", clip, everyday=True),
]

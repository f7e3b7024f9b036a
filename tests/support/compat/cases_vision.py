"""Nets for images, each with its own defaults for dropout, drop-path and normalization.

The named architectures keep their depth; widths, images and batches are as small as leaves the activations
larger than the parameters' gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hybridremat.zoo.unet import UNet
from support.compat.harness import Case
from support.compat.vision_models import (
    Made,
    clip,
    conditioned,
    hugging_face,
    images,
    segformer,
    timm,
    torchvision,
    unet,
)
from support.compat.vision_nets import DropPathNet, GroupUNet

VIT = {"hidden_size": 96, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 384}
SWIN = {"embed_dim": 24, "depths": [2, 2, 6, 2], "num_heads": [1, 2, 4, 8], "window_size": 4}
ROUNDING = "its dropout of 0.025: PyTorch's joint graph scales by another rounding of 1 / (1 − p) than eager"
TV = ("torchvision",)
TIMM = ("timm", "torchvision")


def case(name: str, build: Callable[[], Made], **how: Any) -> Case:
    """A line under Vision."""
    return Case("Vision", name, build, **how)


CASES = [
    case(
        "drop-path and BatchNorm around residuals, by hand",
        lambda: (DropPathNet(), images(4, 16, "images")),
        everyday=True,
    ),
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
        remark=ROUNDING,
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
        remark="run once before wrapping; AOTAutograd decomposes bilinear upsampling",
    ),
    case("U-Net, BatchNorm", partial(unet, UNet)),
    case("U-Net, GroupNorm", partial(unet, GroupUNet)),
    case("diffusion U-Net: time embedding, cross-attention", conditioned),
    case("CLIP", clip),
]

"""Models whose step is not one graph: breaks at values, losses with assignments, code of other libraries."""

from __future__ import annotations

from typing import Any

import torch

from support.compat.harness import Case
from support.compat.several_nets import Gan, OdeNet, Penalized, TwoLosses

GROUP = "Several graphs"
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def boxes(count: int) -> list[dict[str, torch.Tensor]]:
    """Objects of four pictures."""
    corners = [torch.rand(count, 2) * 0.5 + 0.25 for _ in range(4)]
    return [
        {
            "class_labels": torch.randint(0, 5, (count,)),
            "boxes": torch.cat([each, torch.full((count, 2), 0.2)], 1),
        }
        for each in corners
    ]


def detr() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[32, 32, 32, 32],
        depths=[3, 2, 2, 2],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=10,
        num_labels=5,
    )
    model = DetrForObjectDetection(config)
    model.model.unfreeze_backbone()
    return model, {"pixel_values": torch.randn(4, 3, 128, 128), "labels": boxes(3)}


def autoformer() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import AutoformerConfig, AutoformerForPrediction

    config = AutoformerConfig(
        prediction_length=8,
        context_length=24,
        lags_sequence=[1, 2, 3],
        num_time_features=2,
        d_model=32,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        moving_average=5,
        label_length=8,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    past, future = 24 + 3, 8
    return AutoformerForPrediction(config), {
        "past_values": torch.rand(4, past),
        "past_time_features": torch.rand(4, past, 2),
        "past_observed_mask": torch.ones(4, past),
        "future_values": torch.rand(4, future),
        "future_time_features": torch.rand(4, future, 2),
    }


def qwen_vl() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        **SMALL,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    sight = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=sight,
        image_token_id=2,
        video_token_id=3,
        vision_start_token_id=4,
        vision_end_token_id=5,
    )
    tokens = torch.randint(6, 97, (2, 24))
    tokens[:, 1], tokens[:, 2:6], tokens[:, 6] = 4, 2, 5
    return Qwen2_5_VLForConditionalGeneration(config), {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == 2).long(),
        "pixel_values": torch.randn(32, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    }


def hubert_ctc() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import HubertConfig, HubertForCTC

    config = HubertConfig(
        **SMALL,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.0,
    )
    return HubertForCTC(config), {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 20, (2, 5))}


def mask2former() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    backbone = SwinConfig(
        image_size=64,
        embed_dim=16,
        depths=[1, 1, 2, 1],
        num_heads=[2, 2, 4, 4],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=backbone,
        backbone=None,
        use_pretrained_backbone=False,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        dim_feedforward=64,
        encoder_layers=2,
        decoder_layers=3,
        num_attention_heads=4,
        num_queries=10,
        num_labels=5,
        train_num_points=64,
    )
    return Mask2FormerForUniversalSegmentation(config), {
        "pixel_values": torch.randn(2, 3, 64, 64),
        "mask_labels": [(torch.rand(3, 64, 64) > 0.5).float() for _ in range(2)],
        "class_labels": [torch.randint(0, 5, (3,)) for _ in range(2)],
    }


def mixtral() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **{**SMALL, "num_hidden_layers": 3},
        num_key_value_heads=4,
        vocab_size=97,
        max_position_embeddings=64,
        num_local_experts=4,
        output_router_logits=True,
        experts_implementation="eager",
    )
    tokens = torch.randint(0, 97, (4, 48))
    return MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens.clone()}


def ode() -> tuple[torch.nn.Module, dict[str, Any]]:
    return OdeNet(), {"x": torch.randn(8, 3, 16, 16), "labels": torch.randint(0, 5, (8,))}


def gan() -> tuple[torch.nn.Module, dict[str, Any]]:
    return Gan(), {"real": torch.randn(8, 3, 16, 16), "noise": torch.randn(8, 16)}


def penalty() -> tuple[torch.nn.Module, dict[str, Any]]:
    return Penalized(), {
        "real": torch.randn(8, 3, 16, 16),
        "noise": torch.randn(8, 16),
        "mix": torch.rand(8, 1, 1, 1),
    }


def gcn() -> tuple[torch.nn.Module, dict[str, Any]]:
    from support.compat.several_nets import GraphNet

    return GraphNet(), {
        "x": torch.randn(60, 16),
        "edges": torch.randint(0, 60, (2, 240)),
        "labels": torch.randint(0, 4, (60,)),
    }


PLAN = {"graph_breaks": "plan"}
HUGGING, OBJECTS = ("transformers",), ("transformers", "scipy")


def case(name: str, build: Any, needs: tuple[str, ...], *units: str, **more: Any) -> Case:
    """A case of this page: its units, or else the graphs between its breaks."""
    how = {**({"units": units} if units else PLAN), **more.pop("how", {})}
    text = f"units {', '.join(f'`{unit}`' for unit in units)}" if units else '`graph_breaks="plan"`'
    return Case(GROUP, f"{name}; {text}", build, needs=needs, how=how, **more)


def both(name: str, build: Any, needs: tuple[str, ...], *units: str, **more: Any) -> list[Case]:
    """Planned between its breaks, and by units."""
    return [case(name, build, needs, **more), case(name, build, needs, *units, **more)]


NO_LAYERDROP = "`layerdrop=0`: otherwise steps take paths that were not surveyed"
ENCODERS = "model.encoder.layers.*", "model.decoder.layers.*"
CASES = [
    *both("DETR, backbone unfrozen", detr, OBJECTS, "model.backbone", *ENCODERS),
    *both("Autoformer", autoformer, HUGGING, *ENCODERS, remark=NO_LAYERDROP),
    *both("Qwen2.5-VL", qwen_vl, HUGGING, "model.visual.blocks.*", "model.language_model.layers.*"),
    case(
        "HuBERT-CTC",
        hubert_ctc,
        HUGGING,
        remark=NO_LAYERDROP,
    ),
    case(
        "HuBERT-CTC",
        hubert_ctc,
        HUGGING,
        "hubert.feature_extractor",
        "hubert.encoder.layers.*",
        remark=NO_LAYERDROP,
        everyday=True,
    ),
    *both(
        "Mask2Former",
        mask2former,
        OBJECTS,
        "model.pixel_level_module.encoder",
        "model.pixel_level_module.decoder.encoder.layers.*",
        "model.transformer_module.decoder.layers.*",
    ),
    case(
        "Mixtral, experts in eager code",
        mixtral,
        HUGGING,
        "model.layers.*.self_attn",
        "model.layers.*.*layernorm",
        remark="the experts hold most of the memory, and get other rows in each step",
    ),
    *both("torchdiffeq's adjoint between convolutions", ode, ("torchdiffeq",), "before", "after"),
    case(
        "GAN, a backward each",
        gan,
        (),
        "generator",
        "discriminator",
        how={"forwards": 2},
        loss_in=lambda losses: TwoLosses(*losses),
        remark="`forwards=2`",
        everyday=True,
    ),
    case(
        "gradient penalty (`autograd.grad` in the loss)",
        penalty,
        (),
        "generator",
        remark="the critic holds most of the memory; it is differentiated twice, so it runs unplanned",
        everyday=True,
    ),
    *both("PyG GCNConv with its own self-loops", gcn, ("torch_geometric",), "convs.*"),
]

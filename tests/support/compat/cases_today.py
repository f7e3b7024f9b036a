"""Kinds of models that people train: experts with router losses, pictures and words, graphs, diffusion."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from support.compat.cases_decoders import GROUPED, decoder, short_batch, token_batch
from support.compat.harness import Case
from support.compat.today_nets import DiffusionTransformer, GaussianProcess, GraphNet, Words

GROUP = "Kinds of models"
IMAGE = 2
TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    **GROUPED,
}
SIGHT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
SCANNED = {"state_size": 4, "hidden_size": 32, "expand": 2}
ROUTED = {"output_router_logits": True, **GROUPED}


def pictures_in_words() -> dict[str, Any]:
    """Rows of tokens, four of which stand for a picture."""
    batch = token_batch()
    batch["input_ids"][:, 1:5] = IMAGE
    return batch


def llava() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sight = CLIPVisionConfig(num_hidden_layers=3, patch_size=8, **SIGHT)
    config = LlavaConfig(
        vision_config=sight, text_config=LlamaConfig(**TEXT), image_token_id=IMAGE, vision_feature_layer=-2
    )
    return LlavaForConditionalGeneration(config), {
        **pictures_in_words(),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }


def patch_tst() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        prediction_length=8,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
    )
    return PatchTSTForPrediction(config), {
        "past_values": torch.randn(4, 32, 3),
        "future_values": torch.randn(4, 8, 3),
    }


def hubert() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import HubertConfig, HubertForSequenceClassification

    config = HubertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.0,
        apply_spec_augment=False,
    )
    model = HubertForSequenceClassification(config)
    model.freeze_feature_encoder()
    return model, {"input_values": torch.randn(2, 800), "labels": torch.tensor([0, 1])}


def sees_in_pieces(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Idefics3 or SmolVLM, which leaves out pictures by their numbers."""
    import transformers

    of_kind = partial(getattr, transformers)
    sight = of_kind(f"{kind}VisionConfig")(num_hidden_layers=2, patch_size=8, **{**SIGHT, "image_size": 32})
    config = of_kind(f"{kind}Config")(
        vision_config=sight.to_dict(),
        text_config=transformers.LlamaConfig(**TEXT, pad_token_id=0).to_dict(),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    batch = {**pictures_in_words(), "pixel_values": torch.randn(2, 1, 3, 32, 32)}
    return of_kind(f"{kind}ForConditionalGeneration")(config), batch


def hubert_ctc() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import HubertForCTC

    classifier, batch = hubert()
    model = HubertForCTC(classifier.config)
    model.freeze_feature_encoder()
    return model, {**batch, "labels": torch.randint(1, 20, (2, 5))}


def diffusion_transformer() -> tuple[torch.nn.Module, dict[str, Any]]:
    images = {name: torch.randn(2, 3, 16, 16) for name in ("noisy", "noise")}
    return DiffusionTransformer(), {**images, "steps": torch.rand(2)}


def graph_net() -> tuple[torch.nn.Module, dict[str, Any]]:
    edges = torch.cat([torch.randint(0, 40, (2, 160)), torch.arange(40).repeat(2, 1)], dim=1)
    return GraphNet(), {"x": torch.randn(40, 8), "edges": edges, "labels": torch.randint(0, 4, (40,))}


def words(kind: type[torch.nn.RNNBase], **how: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    return Words(kind, **how), {"tokens": torch.randint(0, 40, (32, 16))}


def gaussian_process() -> tuple[torch.nn.Module, dict[str, Any]]:
    return GaussianProcess(), {"x": torch.randn(24, 2), "y": torch.randn(24)}


def case(name: str, build: Any, *needs: str, **more: Any) -> Case:
    """A case of this page."""
    return Case(GROUP, name, build, needs=needs, **more)


HUGGING = "transformers"
PIECES = {"graph_breaks": "plan"}
CASES = [
    case("Mixtral, router losses", decoder("Mixtral", short_batch, num_local_experts=4, **ROUTED), HUGGING),
    case("Qwen3-MoE, router losses", decoder("Qwen3Moe", short_batch, **EXPERTS, **ROUTED), HUGGING),
    case("LLaVA", llava, HUGGING),
    case("PatchTST", patch_tst, HUGGING, remark="PyTorch's `aot_eager` fails on it"),
    case("HuBERT, feature encoder frozen", hubert, HUGGING, remark="`model.freeze_feature_encoder()`"),
    *(
        case(f'{kind}, `graph_breaks="plan"`', partial(sees_in_pieces, kind), HUGGING, how=PIECES)
        for kind in ("SmolVLM", "Idefics3")
    ),
    case(
        'HuBERT-CTC, `graph_breaks="plan"`',
        hubert_ctc,
        HUGGING,
        how=PIECES,
        remark="`model.freeze_feature_encoder()`",
    ),
    case("diffusion transformer (adaLN-Zero), by hand", diffusion_transformer),
    case("graph convolutions by index_add, by hand", graph_net, everyday=True),
    case("nn.LSTM, two layers, dropout", partial(words, torch.nn.LSTM)),
    case("nn.GRU, two layers, dropout", partial(words, torch.nn.GRU)),
    *(
        case(
            f'nn.{kind.__name__} between graph breaks, graph_breaks="plan"',
            partial(words, kind, breaks=True),
            how={"graph_breaks": "plan"},
        )
        for kind in (torch.nn.LSTM, torch.nn.GRU)
    ),
    case(
        "Mamba-2",
        decoder("Mamba2", short_batch, head_dim=8, num_heads=8, n_groups=1, chunk_size=4, **SCANNED),
        HUGGING,
    ),
    case("Gaussian process, Cholesky", gaussian_process, everyday=True),
]

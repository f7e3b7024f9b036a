"""Decoders of transformers, with random weights and their own dropout: labels inside, the loss too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support.compat.harness import Case

GROUP = "Decoders"
WORDS, LENGTH, BATCH = 97, 24, 2
Built = tuple[nn.Module, dict[str, Any]]


def token_batch() -> dict[str, Any]:
    """Whole rows."""
    tokens = torch.randint(3, WORDS, (BATCH, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def short_batch() -> dict[str, Any]:
    """Rows so short that a scan written as a loop stays a small graph."""
    return {name: tokens[:, :8] for name, tokens in token_batch().items()}


def padded_batch() -> dict[str, Any]:
    """Rows of unequal length: an attention mask, and labels that leave the padding out."""
    batch = token_batch()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, LENGTH - 7 :] = 0
    batch["labels"][mask == 0] = -100
    return {**batch, "attention_mask": mask}


def decoder(
    kind: str, batch: Callable[[], dict[str, Any]] = token_batch, **changes: Any
) -> Callable[[], Built]:
    """Build ``{kind}ForCausalLM`` from ``{kind}Config``; sizes not given are small ones of common names."""

    def build() -> Built:
        import transformers

        sizes = {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **changes,
        }
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model_of = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(
            transformers, f"{kind}LMHeadModel"
        )
        return model_of(config), batch()

    return build


def in_bfloat16(build: Callable[[], Built]) -> Callable[[], Built]:
    """The same model with bfloat16 parameters."""

    def converted() -> Built:
        model, batch = build()
        return model.bfloat16(), batch

    return converted


def case(name: str, build: Callable[[], Built], **more: Any) -> Case:
    """A case of this page."""
    return Case(GROUP, name, build, needs=("transformers",), **more)


GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
GROUPED = {"num_key_value_heads": 2}
STATES = {"state_size": 4, "expand": 2, "conv_kernel": 4}
CASES = [
    case("GPT-2, sdpa", decoder("GPT2", **GPT2)),
    case("GPT-2, eager attention", decoder("GPT2", attn_implementation="eager", **GPT2)),
    case("GPT-2, sdpa, padded batch", decoder("GPT2", padded_batch, **GPT2)),
    case("GPT-NeoX, sdpa, padded batch", decoder("GPTNeoX", padded_batch)),
    case("OPT, sdpa, padded batch", decoder("OPT", padded_batch, ffn_dim=64, word_embed_proj_dim=32)),
    case("Llama, sdpa", decoder("Llama", **GROUPED)),
    case("Llama, eager attention", decoder("Llama", attn_implementation="eager", **GROUPED)),
    case("Llama, sdpa, padded batch", decoder("Llama", padded_batch, **GROUPED)),
    case(
        "Llama, eager attention, padded batch",
        decoder("Llama", padded_batch, attn_implementation="eager", **GROUPED),
    ),
    case("Mistral, sdpa, sliding window", decoder("Mistral", sliding_window=8, **GROUPED)),
    case(
        "Mistral, sdpa, sliding window, padded batch",
        decoder("Mistral", padded_batch, sliding_window=8, **GROUPED),
    ),
    case("Qwen2, sdpa, padded batch", decoder("Qwen2", padded_batch, **GROUPED)),
    case("Qwen3, sdpa", decoder("Qwen3", head_dim=8, **GROUPED)),
    case("Gemma, sdpa", decoder("Gemma", head_dim=8, **GROUPED)),
    case("Gemma 2", decoder("Gemma2", head_dim=8, sliding_window=8, **GROUPED)),
    case(
        "Gemma 2, padded batch",
        decoder("Gemma2", padded_batch, head_dim=8, sliding_window=8, **GROUPED),
    ),
    case("Falcon, sdpa, padded batch", decoder("Falcon", padded_batch)),
    case("Phi, sdpa", decoder("Phi")),
    case("Phi, eager attention, padded batch", decoder("Phi", padded_batch, attn_implementation="eager")),
    case(
        "Mixtral, grouped experts",
        decoder("Mixtral", num_local_experts=4, **GROUPED),
        remark="the default: a custom op of transformers where it is compiled in float32",
    ),
    case(
        "Mixtral, batched experts",
        decoder("Mixtral", padded_batch, num_local_experts=4, experts_implementation="batched_mm", **GROUPED),
    ),
    case(
        "Mixtral, bfloat16",
        in_bfloat16(decoder("Mixtral", num_local_experts=4, use_cache=False, **GROUPED)),
        remark="PyTorch's grouped product; compiled attention without caches rounds in another way",
    ),
    case(
        "Mamba, slow path",
        decoder("Mamba", short_batch, use_associative_scan=False, **STATES),
        remark="`use_associative_scan=False`",
    ),
    case(
        "Mamba, associative scan",
        decoder("Mamba", short_batch, **STATES),
        remark="the default: the model asks whether it is compiled, and then uses another scan than in eager",
    ),
]

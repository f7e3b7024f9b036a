"""Encoders and encoder-decoders of transformers, with random weights and their own dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.compat.cases_decoders import BATCH, LENGTH, WORDS, Built, padded_batch, token_batch
from support.compat.harness import Case

CLASSES = 3


def classes_batch() -> dict[str, Any]:
    """A padded batch with one label a row."""
    return {**padded_batch(), "labels": torch.randint(0, CLASSES, (BATCH,))}


def answer_batch() -> dict[str, Any]:
    """A padded source, and a shorter target."""
    return {**padded_batch(), "labels": torch.randint(3, WORDS, (BATCH, LENGTH - 8))}


def speech_batch() -> dict[str, Any]:
    """A spectrogram of 16 mel bands and 64 frames, and its text."""
    return {
        "input_features": torch.randn(BATCH, 16, 64),
        "labels": torch.randint(3, WORDS, (BATCH, 12)),
    }


def built(kind: str, head: str, batch: Callable[[], dict[str, Any]], **changes: Any) -> Callable[[], Built]:
    """Build ``{kind}For{head}`` from ``{kind}Config``."""

    def build() -> Built:
        import transformers

        config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, **changes)
        return getattr(transformers, f"{kind}For{head}")(config), batch()

    return build


def case(group: str, name: str, build: Callable[[], Built], **more: Any) -> Case:
    """A case of this page."""
    return Case(group, name, build, needs=("transformers",), **more)


ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
TWO_STACKS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
MASKED, CLASSIFIED, TRANSLATED = "MaskedLM", "SequenceClassification", "ConditionalGeneration"
DISTILLED = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64}
DISENTANGLED = {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
SPEECH = {**TWO_STACKS, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}

CASES = [
    case("Encoders", "BERT, masked LM, sdpa", built("Bert", MASKED, token_batch, **ENCODER)),
    case(
        "Encoders",
        "BERT, masked LM, eager attention, padded batch",
        built("Bert", MASKED, padded_batch, attn_implementation="eager", **ENCODER),
    ),
    case(
        "Encoders",
        "BERT, classification, sdpa, padded batch",
        built("Bert", CLASSIFIED, classes_batch, num_labels=CLASSES, **ENCODER),
    ),
    case(
        "Encoders",
        "RoBERTa, classification, padded batch",
        built("Roberta", CLASSIFIED, classes_batch, num_labels=CLASSES, pad_token_id=0, **ENCODER),
    ),
    case(
        "Encoders",
        "DistilBERT, masked LM, padded batch",
        built("DistilBert", MASKED, padded_batch, **DISTILLED),
    ),
    case(
        "Encoders",
        "DeBERTa-v2, masked LM, padded batch",
        built("DebertaV2", MASKED, padded_batch, **DISENTANGLED),
    ),
    case(
        "Encoders",
        "ELECTRA, classification, padded batch",
        built("Electra", CLASSIFIED, classes_batch, num_labels=CLASSES, embedding_size=16, **ENCODER),
    ),
    case(
        "Encoder–decoders",
        "T5, padded batch",
        built("T5", TRANSLATED, answer_batch, **T5),
    ),
    case(
        "Encoder–decoders",
        "BART, padded batch",
        built("Bart", TRANSLATED, answer_batch, max_position_embeddings=64, **TWO_STACKS),
    ),
    case("Encoder–decoders", "Whisper", built("Whisper", TRANSLATED, speech_batch, **SPEECH)),
]

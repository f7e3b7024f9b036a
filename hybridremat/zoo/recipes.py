"""The built-in models from transformers: class, config, and the shape of one batch."""

from __future__ import annotations

from dataclasses import dataclass, field

VOCABULARY = 4096
WIDTH = 256
CLASSES = 10


@dataclass(frozen=True)
class Recipe:
    """One built-in model.

    Attributes
    ----------
    model, config
        Names of the classes in transformers.
    fields
        Fields of the config that differ from its defaults.
    dropouts
        Fields that are probabilities of a dropout.
    shape
        ``batch``, and ``length`` (tokens) or ``pixels`` (height and width).
    max_size_field
        The field of the config that bounds the length or width of inputs; empty if there is none.
    attributes
        Set on the model once it is made.
    """

    model: str
    config: str
    fields: dict[str, object]
    shape: dict[str, int]
    dropouts: tuple[str, ...] = ()
    max_size_field: str = ""
    attributes: dict[str, object] = field(default_factory=dict)


_HIDDEN = ("hidden_dropout_prob", "attention_probs_dropout_prob")

RECIPES = {
    "gpt2": Recipe(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_layer": 6,
            "n_embd": WIDTH,
            "n_head": 4,
            "n_positions": 512,
            "vocab_size": VOCABULARY,
            "bos_token_id": None,  # the default is outside this vocabulary
            "eos_token_id": None,
            "use_cache": False,
        },
        {"batch": 2, "length": 512},
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        max_size_field="n_positions",
        attributes={"loss_type": "ForCausalLM"},  # otherwise the forward logs a warning: a graph break
    ),
    "llama": Recipe(
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "num_hidden_layers": 6,
            "hidden_size": WIDTH,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 704,
            "vocab_size": VOCABULARY,
            "use_cache": False,
        },
        {"batch": 2, "length": 512},
    ),
    "bert": Recipe(
        "BertForMaskedLM",
        "BertConfig",
        {
            "num_hidden_layers": 6,
            "hidden_size": WIDTH,
            "num_attention_heads": 4,
            "intermediate_size": 4 * WIDTH,
            "vocab_size": VOCABULARY,
        },
        {"batch": 2, "length": 512},
        _HIDDEN,
        max_size_field="max_position_embeddings",
    ),
    "t5": Recipe(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": WIDTH,
            "d_ff": 2 * WIDTH,
            "num_layers": 4,
            "num_decoder_layers": 4,
            "num_heads": 4,
            "d_kv": 64,
            "vocab_size": VOCABULARY,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        {"batch": 2, "length": 256},
        ("dropout_rate",),
    ),
    "vit": Recipe(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "num_hidden_layers": 12,
            "hidden_size": 192,
            "num_attention_heads": 3,
            "intermediate_size": 768,
            "image_size": 160,
            "num_labels": CLASSES,
        },
        {"batch": 4, "pixels": 160},
        _HIDDEN,
        max_size_field="image_size",
    ),
    "resnet50": Recipe(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"num_labels": CLASSES},
        {"batch": 8, "pixels": 128},
    ),
}

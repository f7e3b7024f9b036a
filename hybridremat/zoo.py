"""Built-in models: small, real, with random weights, nothing downloaded.

They are what the command line plans by name, what the tests train and what the recorded frontiers in
``benchmarks/data/reference_frontiers.csv`` belong to. Every model comes in train mode with one batch of
keyword arguments, labels included, so that its loss is inside.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hybridremat.errors import ModelError
from hybridremat.unet import UNet

VOCABULARY = 4096
WIDTH = 256
CLASSES = 10

Batch = dict[str, Tensor]


def reference_model(name: str, dropout: float = 0.0) -> tuple[nn.Module, Batch]:
    """Make a built-in model and a batch for it, the same ones in every call.

    Parameters
    ----------
    name
        One of :data:`REFERENCE_MODELS`.
    dropout
        Probability of every dropout in the model. Llama, ResNet-50 and the U-Net have none.

    Returns
    -------
    tuple
        The model in train mode, and the keyword arguments of its forward.

    Raises
    ------
    ModelError
        If the name is unknown, or the model needs a package that is not installed.

    Notes
    -----
    Seeds torch's global generator with 0 and draws weights, then inputs, from it.
    """
    make = _MAKERS.get(name)
    if make is None:
        raise ModelError(f"there is no built-in model {name!r}; there are {', '.join(REFERENCE_MODELS)}.")
    torch.manual_seed(0)
    model, draw_batch = make(dropout)
    return model.train(), draw_batch()


def _transformers() -> ModuleType:
    """Import transformers where it is used: it takes seconds, and is not needed to plan."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "this built-in model comes from the package transformers, which is not installed: "
            "pip install 'hybridremat[models]'"
        ) from error
    module: ModuleType = transformers
    return module


def _token_batch(batch: int, length: int) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _image_batch(batch: int, pixels: int) -> Batch:
    images = torch.randn(batch, 3, pixels, pixels)
    return {"pixel_values": images, "labels": torch.randint(0, CLASSES, (batch,))}


# What a maker returns: the model, and a function that draws the batch once the weights are drawn.
_Made = tuple[Any, Callable[[], Batch]]


def _gpt2(dropout: float) -> _Made:
    library = _transformers()
    config = library.GPT2Config(
        n_layer=6,
        n_embd=WIDTH,
        n_head=4,
        n_positions=512,
        vocab_size=VOCABULARY,
        bos_token_id=None,  # the default is outside this vocabulary
        eos_token_id=None,
        use_cache=False,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    model = library.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # otherwise a warning is logged in the forward: a graph break
    return model, lambda: _token_batch(2, 512)


def _bert(dropout: float) -> _Made:
    library = _transformers()
    config = library.BertConfig(
        num_hidden_layers=6,
        hidden_size=WIDTH,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return library.BertForMaskedLM(config), lambda: _token_batch(2, 512)


def _llama(dropout: float) -> _Made:  # noqa: ARG001 (Llama has no dropout)
    library = _transformers()
    config = library.LlamaConfig(
        num_hidden_layers=6,
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=704,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return library.LlamaForCausalLM(config), lambda: _token_batch(2, 512)


def _t5(dropout: float) -> _Made:
    library = _transformers()
    config = library.T5Config(
        d_model=WIDTH,
        d_ff=2 * WIDTH,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        d_kv=64,
        vocab_size=VOCABULARY,
        dropout_rate=dropout,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        use_cache=False,
    )
    return library.T5ForConditionalGeneration(config), lambda: _token_batch(2, 256)


def _vit(dropout: float) -> _Made:
    library = _transformers()
    config = library.ViTConfig(
        num_hidden_layers=12,
        hidden_size=192,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=160,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return library.ViTForImageClassification(config), lambda: _image_batch(4, 160)


def _resnet50(dropout: float) -> _Made:  # noqa: ARG001 (ResNet has no dropout)
    library = _transformers()
    config = library.ResNetConfig(num_labels=CLASSES)
    return library.ResNetForImageClassification(config), lambda: _image_batch(8, 128)


def _unet(dropout: float) -> _Made:  # noqa: ARG001 (this U-Net has no dropout)
    def draw_batch() -> Batch:
        images = torch.randn(4, 3, 128, 128)
        return {"x": images, "labels": torch.randint(0, 2, (4, 128, 128))}

    return UNet(), draw_batch


_MAKERS: dict[str, Callable[[float], _Made]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "resnet50": _resnet50,
    "unet": _unet,
}

#: Names of the built-in models.
REFERENCE_MODELS: tuple[str, ...] = tuple(_MAKERS)

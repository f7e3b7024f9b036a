"""The models that the demo trains: real ones from transformers, small, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridremat.analysis.measure import loss_of
from hybridremat.zoo.models import reference_model

Made = tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]


@dataclass(frozen=True)
class DemoModel:
    """A model of the demo; ``make`` returns it with the same weights, batch and loss in every call.

    ``loss_outside``: the loss is computed by the caller's code, from the model's output. ``in_backward``: it
    is trained with its optimizer in the backward, too. ``offload``: only under less than fits without moves.
    """

    name: str
    make: Callable[[], Made]
    loss_outside: bool = False
    in_backward: bool = False
    offload: bool = False


def _gpt2() -> Made:
    model, batch = reference_model("gpt2", dropout=0.1)
    _silence_transformers()
    torch.manual_seed(0)
    # Made again from its config: like a user's own, this model has no loss_type set, and logs a warning.
    return type(model)(model.config).train(), batch, loss_of


def _silence_transformers() -> None:
    """Keep the notices of transformers out of the output."""
    import transformers

    transformers.logging.set_verbosity_error()


def _resnet50() -> Made:
    model, batch = reference_model("resnet50")
    return model, batch, loss_of


def _llama() -> Made:
    model, batch = reference_model("llama")
    labels = batch.pop("labels")

    def next_token_loss(output: Any) -> Tensor:
        targets = labels[:, 1:].to(output.logits.device)
        return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets.flatten())

    return model, batch, next_token_loss


def _unet() -> Made:
    model, batch = reference_model("unet", changes={"base": 16, "pixels": 128, "batch": 8})
    return model, batch, loss_of


DEMO_MODELS: dict[str, DemoModel] = {
    "gpt2": DemoModel("GPT-2, dropout 0.1", _gpt2, in_backward=True),
    "resnet50": DemoModel("ResNet-50, BatchNorm", _resnet50),
    "llama": DemoModel("Llama, loss outside", _llama, loss_outside=True),
    "unet": DemoModel("U-Net, long skips", _unet, offload=True),
}

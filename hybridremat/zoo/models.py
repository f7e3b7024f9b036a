"""Built-in models: small, real, with random weights, nothing downloaded.

The command line plans them by name, the tests train them, and the frontiers recorded in
``benchmarks/data/reference_frontiers.csv`` are theirs. Every model comes in train mode with one batch of
keyword arguments, labels included, so that its loss is inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hybridremat.errors import ModelError, TargetError
from hybridremat.zoo.config import DTYPES, unknown_key, whole_number, with_changes
from hybridremat.zoo.recipes import RECIPES, Recipe
from hybridremat.zoo.unet import UNet

Batch = dict[str, Tensor]

# A model, and a function that draws its batch: called after the weights are drawn, from the same generator.
_Made = tuple[nn.Module, Callable[[], Batch]]

#: Names of the built-in models.
REFERENCE_MODELS: tuple[str, ...] = (*RECIPES, "unet")


def reference_model(
    name: str, dropout: float = 0.0, changes: Mapping[str, object] | None = None
) -> tuple[nn.Module, Batch]:
    """Make a built-in model and a batch for it, the same ones in every call.

    Parameters
    ----------
    name
        One of :data:`REFERENCE_MODELS`.
    dropout
        Probability of every dropout in the model. Llama, ResNet-50 and the U-Net have none.
    changes
        Fields of its config to set (of the U-Net: its parameters), and ``batch``, ``length`` or ``pixels``,
        ``dtype``.

    Returns
    -------
    tuple
        The model in train mode, and the keyword arguments of its forward.

    Raises
    ------
    ModelError
        If the name is unknown, or the model needs a package that is not installed.
    TargetError
        If a change names no field, has the wrong type, or does not go with the others.

    Notes
    -----
    Seeds torch's global generator with 0 and draws weights, then inputs, from it.
    """
    if name not in REFERENCE_MODELS:
        raise ModelError(f"there is no built-in model {name!r}; there are {', '.join(REFERENCE_MODELS)}.")
    rest = dict(changes or {})
    dtype = _dtype(rest.pop("dtype", "float32"))
    torch.manual_seed(0)
    model, draw_batch = _unet(rest) if name == "unet" else _from_transformers(name, dropout, rest)
    batch = {key: t.to(dtype) if t.is_floating_point() else t for key, t in draw_batch().items()}
    return model.to(dtype).train(), batch


def has_dropout(name: str) -> bool:
    """Whether a built-in model has dropouts."""
    return name in RECIPES and bool(RECIPES[name].dropouts)


def _dtype(name: object) -> torch.dtype:
    if name not in DTYPES:
        raise TargetError(f"--set dtype={name}: give {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, str(name))
    return dtype


def _transformers() -> ModuleType:
    """Import transformers only where it is used: that takes seconds, and planning does not need it."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "this built-in model comes from the package transformers, which is not installed: "
            "pip install 'hybridremat[models]'"
        ) from error
    module: ModuleType = transformers
    return module


def _from_transformers(name: str, dropout: float, changes: Mapping[str, object]) -> _Made:
    library, recipe = _transformers(), RECIPES[name]
    config_class = getattr(library, recipe.config)
    if changes:
        recipe = with_changes(recipe, name, config_class, changes)
    rates = {field: dropout for field in recipe.dropouts if field not in changes}
    try:
        config = config_class(**{**recipe.fields, **rates})
        model = getattr(library, recipe.model)(config)
    except Exception as error:
        if not changes:
            raise
        asked = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        text = " ".join(str(error).split())
        raise TargetError(f"{name} cannot be made with {asked}: {text} ({type(error).__name__})") from error
    for attribute, value in recipe.attributes.items():
        setattr(model, attribute, value)
    return model, lambda: _batch(recipe, config)


def _batch(recipe: Recipe, config: Any) -> Batch:
    size = recipe.shape["batch"]
    if "length" in recipe.shape:
        tokens = torch.randint(0, config.vocab_size, (size, recipe.shape["length"]))
        return {"input_ids": tokens, "labels": tokens.clone()}
    pixels = recipe.shape["pixels"]
    images = torch.randn(size, config.num_channels, pixels, pixels)
    return {"pixel_values": images, "labels": torch.randint(0, config.num_labels, (size,))}


def _unet(changes: Mapping[str, object]) -> _Made:
    numbers = {"batch": 4, "pixels": 128, "base": 32, "depth": 4, "channels_in": 3}
    for key, value in changes.items():
        if key not in numbers:
            raise unknown_key(key, "unet", numbers, (*numbers, "dtype"))
        numbers[key] = whole_number(key, value)
    size, pixels, base, depth, channels = numbers.values()
    if pixels % 2**depth:
        raise TargetError(f"unet: pixels={pixels}, with depth={depth}; give a multiple of {2**depth}")

    def draw_batch() -> Batch:
        images = torch.randn(size, channels, pixels, pixels)
        return {"x": images, "labels": torch.randint(0, 2, (size, pixels, pixels))}

    return UNet(base, depth, channels), draw_batch

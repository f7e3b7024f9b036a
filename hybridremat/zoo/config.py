"""Changes (``--set KEY=VALUE``) to the config of a built-in model and to the shape of its batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from hybridremat.errors import TargetError
from hybridremat.units import is_count
from hybridremat.zoo.recipes import Recipe

DTYPES = ("float32", "bfloat16", "float16")
_NO_FIELDS = {"model_type", "transformers_version", "architectures", "torch_dtype", "_name_or_path"}


def with_changes(recipe: Recipe, name: str, config_class: Any, changes: Mapping[str, object]) -> Recipe:
    """The recipe with changed fields of its config and a changed shape of the batch.

    Parameters
    ----------
    name
        The model's name, for messages.
    config_class
        The class that ``recipe.config`` names.

    Raises
    ------
    TargetError
        If a key is unknown, or a value has the wrong type.
    """
    defaults = config_class().to_dict()
    aliases: Mapping[str, str] = getattr(config_class, "attribute_map", {})
    common = (*recipe.shape, "dtype", *(field for field, value in recipe.fields.items() if value))
    fields, shape = dict(recipe.fields), dict(recipe.shape)
    given: set[str] = set()
    for key, value in changes.items():
        field = aliases.get(key, key)
        if key in shape:
            shape[key] = whole_number(key, value)
        elif (field in defaults and field not in _NO_FIELDS) or field == "num_labels":
            require_like(key, value, recipe.fields.get(field, defaults.get(field)))
            if field in given:
                raise TargetError(f"--set {key}: it is the same field as {field}, which is set, too")
            fields[field] = value
        else:
            raise unknown_key(key, name, [*common, *aliases, *set(defaults) - _NO_FIELDS], common)
        given.add(field)
    most = fields.get(recipe.max_size_field, defaults.get(recipe.max_size_field))
    return _fitted(replace(recipe, fields=fields, shape=shape), name, most, given)


def require_like(key: str, value: object, default: object) -> None:
    """Refuse a value of another type than the default, and counts below one.

    Raises
    ------
    TargetError
    """
    if default is None or value is None:
        return
    known = (int, float) if type(default) is float else type(default)
    if not isinstance(value, known) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise TargetError(
            f"--set {key}={value!r} is {type(value).__name__}; give {type(default).__name__}, "
            f"as its default {default!r} is"
        )
    if type(default) is int and default > 0 and not key.endswith("_id"):
        whole_number(key, value)


def _fitted(recipe: Recipe, name: str, most: object, given: set[str]) -> Recipe:
    """The recipe with inputs and config that fit: if one of the two sizes was set, the other follows it."""
    if not recipe.max_size_field:
        return recipe
    size = "length" if "length" in recipe.shape else "pixels"
    wanted = recipe.shape[size]
    assert isinstance(most, int)
    if wanted == most or (wanted < most and size == "length"):
        return recipe
    if recipe.max_size_field not in given:
        return replace(recipe, fields={**recipe.fields, recipe.max_size_field: wanted})
    if size not in given:
        return replace(recipe, shape={**recipe.shape, size: most})
    both = f"--set {size}={wanted}: {name} takes {recipe.max_size_field}={most}"
    raise TargetError(f"{both}; set only one of them")


def unknown_key(key: str, owner: str, known: Iterable[str], common: Sequence[str]) -> TargetError:
    """The error for an unknown key: close matches among ``known``, and the ``common`` keys."""
    close = get_close_matches(key, dict.fromkeys(known), n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return TargetError(f"--set {key}: {owner} has no such field; {hint}Common ones: {', '.join(common)}.")


def whole_number(key: str, value: object) -> int:
    """``value`` as a count of at least one.

    Raises
    ------
    TargetError
    """
    if not is_count(value):
        raise TargetError(f"--set {key}={value!r}: give a whole number of at least 1")
    return value

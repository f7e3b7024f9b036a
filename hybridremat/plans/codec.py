"""Plans as plain JSON types, and back. Ops, values and options are rows with named ``columns``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from cattrs import Converter
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError
from cattrs.preconf.json import make_converter

from hybridremat.blocks.types import Option, OptionSet
from hybridremat.errors import PlanFormatError
from hybridremat.files import write_atomic
from hybridremat.graph.joint import Delivery, Op, Value
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.validate import require_sound
from hybridremat.sequence.decisions import Backward, Decision, Forward, ForwardOption, Solo

P = TypeVar("P", bound=PlanData)

SCHEMA = 6  # version of what plan_to_dict returns
UNREADABLE = (
    *(BaseValidationError, ForbiddenExtraKeysError),
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)
"""What structuring raises for data that is not what it should be."""

_ROWS = (Op, Value, Delivery, Option)
_DECISIONS = {kind.__name__: kind for kind in (Forward, ForwardOption, Backward, Solo)}


def plan_to_dict(plan: PlanData) -> dict[str, Any]:
    """The plan as JSON types, with the schema's version and a checksum of the rest."""
    data = json.loads(json.dumps(_converter().unstructure(plan)))
    return {"schema": SCHEMA, "columns": _columns(), "checksum": _checksum(data), **data}


def plan_from_dict(data: object, kind: type[P]) -> P:
    """The plan that :func:`plan_to_dict` was called on, as an object of class ``kind``.

    Raises
    ------
    PlanFormatError
        If something is missing, mistyped or changed, or the schema version is another.
    """
    if not isinstance(data, Mapping) or "schema" not in data:
        raise PlanFormatError("not a plan: there is no schema version in it")
    if data["schema"] != SCHEMA:
        raise PlanFormatError(
            f"schema version {data['schema']!r}; this hybridremat reads version {SCHEMA}: make the plan "
            "again with this version (hybridremat plan … -o)"
        )
    rest = {name: item for name, item in data.items() if name not in ("schema", "columns", "checksum")}
    if data.get("checksum") != _checksum(rest):
        raise PlanFormatError(
            "the plan is damaged, or has been edited: its checksum does not fit. Make it again"
        )
    try:
        plan = _converter().structure(rest, kind)
        require_sound(plan)
    except UNREADABLE as error:
        raise PlanFormatError(f"the plan is damaged ({type(error).__name__}: {error})") from error
    return plan


def options_to_dict(options: OptionSet) -> dict[str, Any]:
    """The options of a block as JSON types."""
    data: dict[str, Any] = _converter().unstructure(options)
    return data


def options_from_dict(data: Any) -> OptionSet:
    """The options that :func:`options_to_dict` was called on; raises one of :data:`UNREADABLE` for others."""
    return _converter().structure(data, OptionSet)


def _checksum(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _columns() -> dict[str, list[str]]:
    return {kind.__name__: _names(kind) for kind in _ROWS}


def _names(kind: type) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]


@cache
def _converter() -> Converter:
    converter = make_converter(forbid_extra_keys=True, detailed_validation=False)
    for kind in _ROWS:
        converter.register_unstructure_hook(kind, _row_writer(converter, kind))
        converter.register_structure_hook(kind, _row_reader(converter, kind))
    converter.register_unstructure_hook_func(lambda kind: kind == frozenset[int], sorted)  # one order
    converter.register_unstructure_hook(Decision, _written_decision)
    converter.register_structure_hook(Decision, _read_decision)
    return converter


def _row_writer(converter: Converter, kind: type) -> Callable[[Any], list[Any]]:
    names = _names(kind)
    return lambda item: [converter.unstructure(getattr(item, name)) for name in names]


def _row_reader(converter: Converter, kind: type) -> Callable[[Any, Any], Any]:
    types = list(get_type_hints(kind).values())

    def read(row: Any, _: object) -> Any:
        return kind(*(converter.structure(cell, each) for cell, each in zip(row, types, strict=True)))

    return read


def _written_decision(decision: Decision) -> list[Any]:
    return [type(decision).__name__, *dataclasses.astuple(decision)]


def _read_decision(row: Any, _: object) -> Decision:
    name, *numbers = row
    made: Decision = _DECISIONS[name](*map(int, numbers))
    return made


def write_plan(plan: PlanData, path: str | Path) -> None:
    """Write a plan as JSON; the file appears complete or not at all.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    write_atomic(Path(path), json.dumps(plan_to_dict(plan)) + "\n")


def read_plan(path: str | Path, kind: type[P]) -> P:
    """Read a plan that :func:`write_plan` wrote, as an object of class ``kind``.

    Raises
    ------
    PlanFormatError
        If the file is no plan, is damaged, or has another schema version.
    OSError
        If it cannot be read.
    """
    try:
        return plan_from_dict(json.loads(Path(path).read_text(encoding="utf-8")), kind)
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 alike
        raise PlanFormatError(f"{path} is no plan: it is not JSON ({error})") from error
    except PlanFormatError as error:
        raise PlanFormatError(f"{path}: {error}") from error

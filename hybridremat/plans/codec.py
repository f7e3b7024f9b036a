"""Plans as plain JSON types, and back. Ops, values and options are rows with named ``columns``.

Files of earlier schemas are read by the columns that they name themselves; what they lack has its default,
and their memory is counted by the rules of now.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from cattrs import Converter
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from cattrs.preconf.json import make_converter

from hybridremat.blocks.types import Option, OptionSet
from hybridremat.errors import OutputError, PlanFormatError
from hybridremat.files import write_atomic
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.graph.joint import Delivery, Op, Value
from hybridremat.graph.sizes import Size, Term, as_data, from_data
from hybridremat.plans.file_data import MOST_BYTES, read_data
from hybridremat.plans.fsdp import Fsdp
from hybridremat.plans.migrations import migrated
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.recount import recounted
from hybridremat.plans.request import AnyCostModel, AnyDevice, AnyFsdp
from hybridremat.plans.validate import require_sound
from hybridremat.sequence.decisions import Backward, Decision, Forward, ForwardOption, Solo
from hybridremat.units import format_bytes

P = TypeVar("P", bound=PlanData)

SCHEMA = 8  # version of what plan_to_dict returns
OLDEST = 4  # version of the oldest files that are read
_ROWS = (Op, Value, Delivery, Option)
_DECISIONS = {kind.__name__: kind for kind in (Forward, ForwardOption, Backward, Solo)}


def plan_to_dict(plan: PlanData) -> dict[str, Any]:
    """The plan as JSON types, with the schema's version and a checksum of the rest."""
    data = {"schema": SCHEMA, "columns": _columns(), **_converter().unstructure(plan.covering())}
    data = json.loads(json.dumps(data))
    return {"checksum": checksum(data), **data}


def plan_from_dict(data: object, kind: type[P]) -> P:
    """The plan that :func:`plan_to_dict` was called on, as an object of class ``kind``.

    Raises
    ------
    PlanFormatError
        If something is missing, mistyped or changed, or its schema version is not read.
    """
    if not isinstance(data, Mapping) or "schema" not in data:
        raise PlanFormatError("not a plan: there is no schema version in it")
    _require_readable(data["schema"])
    if data.get("checksum") != checksum(data):
        raise PlanFormatError(
            "the plan is damaged, or has been edited: its checksum does not fit. Make it again"
        )
    try:
        columns = tuple((name, tuple(names)) for name, names in data["columns"].items())
        plan = _converter(columns).structure(migrated(_content(data), data["schema"]), kind)
        if data["schema"] < SCHEMA:
            plan = recounted(plan)
        require_sound(plan)
    except Exception as error:  # whatever structuring raises for data that is not what it should be
        raise PlanFormatError(f"the plan is damaged ({type(error).__name__}: {error})") from error
    return plan


def _require_readable(schema: object) -> None:
    if type(schema) is int and OLDEST <= schema <= SCHEMA:
        return
    newer = isinstance(schema, int) and schema > SCHEMA
    instead = "update hybridremat" if newer else "make the plan again (hybridremat plan … -o)"
    raise PlanFormatError(
        f"schema version {schema!r}; this hybridremat reads versions {OLDEST} to {SCHEMA}: {instead}"
    )


def options_to_dict(options: OptionSet) -> dict[str, Any]:
    """The options of a block as JSON types."""
    data: dict[str, Any] = _converter().unstructure(options)
    return data


def options_from_dict(data: Any) -> OptionSet:
    """The options that :func:`options_to_dict` was called on.

    Raises
    ------
    PlanFormatError
        If they are not what they should be.
    """
    try:
        return _converter().structure(data, OptionSet)
    except Exception as error:  # whatever structuring raises
        raise PlanFormatError(f"the options are damaged ({type(error).__name__}: {error})") from error


def checksum(data: Mapping[str, Any]) -> str:
    """The checksum of a file's data; before schema 7 it was of the content alone."""
    rest = {name: item for name, item in data.items() if name != "checksum"}
    covered = _content(data) if data.get("schema") in (4, 5, 6) else rest
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _content(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in data.items() if name not in ("schema", "columns", "checksum")}


def _columns() -> dict[str, tuple[str, ...]]:
    return {kind.__name__: tuple(item.name for item in dataclasses.fields(kind)) for kind in _ROWS}


@lru_cache(maxsize=4)
def _converter(columns: tuple[tuple[str, tuple[str, ...]], ...] = tuple(_columns().items())) -> Converter:
    """Writes rows as they are now, and reads rows with ``columns``, by the name of their type."""
    converter = make_converter(forbid_extra_keys=True, detailed_validation=False)
    written, read = _columns(), dict(columns)
    for kind in _ROWS:
        name = kind.__name__
        converter.register_unstructure_hook(kind, _row_writer(converter, written[name]))
        converter.register_structure_hook(kind, _row_reader(converter, kind, read.get(name, ())))
    converter.register_unstructure_hook_func(lambda kind: kind == frozenset[int], sorted)  # one order
    _let_out_others(converter)
    _read_as(converter, AnyCostModel, str)
    converter.register_unstructure_hook(Term, as_data)
    converter.register_structure_hook_func(lambda kind: kind == Size, lambda item, _: from_data(item))
    _read_as(converter, AnyDevice, DeviceSpec | None)
    _read_as(converter, AnyFsdp, Fsdp | None)
    converter.register_unstructure_hook(Decision, _written_decision)
    converter.register_structure_hook(Decision, _read_decision)
    return converter


def _let_out_others(converter: Converter) -> None:
    """The capture that a plan is of is not stored with it."""

    def is_plan(kind: Any) -> bool:
        return isinstance(kind, type) and issubclass(kind, PlanData)

    converter.register_unstructure_hook_factory(
        is_plan, lambda kind: make_dict_unstructure_fn(kind, converter, others=override(omit=True))
    )
    converter.register_structure_hook_factory(
        is_plan,
        lambda kind: make_dict_structure_fn(
            kind,
            converter,
            _cattrs_forbid_extra_keys=True,
            _cattrs_detailed_validation=False,
            others=override(omit=True),
        ),
    )


def _read_as(converter: Converter, given: object, stored: Any) -> None:
    """What may be given in several ways is stored in one."""
    converter.register_structure_hook_func(
        lambda kind: kind == given, lambda item, _: converter.structure(item, stored)
    )


def _row_writer(converter: Converter, names: tuple[str, ...]) -> Callable[[Any], list[Any]]:
    return lambda item: [converter.unstructure(getattr(item, name)) for name in names]


def _row_reader(converter: Converter, kind: type, names: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    hints = get_type_hints(kind)
    types = [(name, hints[name]) for name in names]

    def read(row: Any, _: object) -> Any:
        cells = zip(types, row, strict=True)
        return kind(**{name: converter.structure(cell, each) for (name, each), cell in cells})

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
        If it cannot be written, or would be too large to be read.
    """
    text = json.dumps(plan_to_dict(plan)) + "\n"
    if len(text) > MOST_BYTES:
        size, most = format_bytes(len(text)), format_bytes(MOST_BYTES)
        raise OutputError(f"the plan takes {size} as a file, and no more than {most} are read: use it here")
    write_atomic(Path(path), text)


def read_plan(path: str | Path, kind: type[P]) -> P:
    """Read a plan that :func:`write_plan` wrote, as an object of class ``kind``.

    Raises
    ------
    PlanFormatError
        If the file is no plan, is damaged, or its schema version is not read.
    OSError
        If it cannot be read.
    """
    try:
        return plan_from_dict(read_data(Path(path)), kind)
    except PlanFormatError as error:
        raise PlanFormatError(f"{path}: {error}") from error

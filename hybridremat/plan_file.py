"""Plans as JSON: what ``hybridremat plan -o`` writes and ``hybridremat inspect`` reads."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridremat.errors import PlanFormatError
from hybridremat.graph.joint import Schedule
from hybridremat.plans import SCHEMA, GraphBreak, Plan, PlannedBlock, ValueRecord


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON; the file appears complete or not at all.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(plan.to_dict(), file, indent=1)
            file.write("\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_plan(path: str | Path) -> Plan:
    """Read a plan that :func:`write_plan` wrote.

    Raises
    ------
    PlanFormatError
        If the file is no plan, is damaged, or has another schema version.
    OSError
        If it cannot be read.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return plan_from_dict(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanFormatError(f"{path} is no plan: it is not JSON ({error})") from error
    except PlanFormatError as error:
        raise PlanFormatError(f"{path}: {error}") from error


def plan_from_dict(data: object) -> Plan:
    """The plan that :meth:`Plan.to_dict` was called on.

    Raises
    ------
    PlanFormatError
        If something is missing or has the wrong shape, or the schema version is another.
    """
    if not isinstance(data, Mapping) or "schema" not in data:
        raise PlanFormatError("not a plan: there is no schema version in it")
    if data["schema"] != SCHEMA:
        raise PlanFormatError(f"schema version {data['schema']!r}; this hybridremat reads version {SCHEMA}")
    try:
        return _plan({name: item for name, item in data.items() if name != "schema"})
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanFormatError(f"the plan is damaged ({type(error).__name__}: {error})") from error


def _plan(data: Mapping[str, Any]) -> Plan:
    given = dict(data)
    schedule = given.pop("schedule")
    given["schedule"] = Schedule(tuple(schedule["steps"]), schedule["num_forward"])
    given["blocks"] = tuple(_block(block) for block in given["blocks"])
    given["parts"] = tuple(_plan(part) for part in given["parts"])
    given["breaks"] = tuple(GraphBreak(**item) for item in given["breaks"])
    return Plan(**given)


def _block(data: Mapping[str, Any]) -> PlannedBlock:
    given = dict(data)
    given["modules"] = tuple(given["modules"])
    given["saved"] = tuple(_record(record) for record in given["saved"])
    given["recomputed"] = tuple((_record(record), times) for record, times in given["recomputed"])
    return PlannedBlock(**given)


def _record(data: Mapping[str, Any]) -> ValueRecord:
    record = ValueRecord(**data)
    return dataclasses.replace(record, shape=tuple(record.shape))

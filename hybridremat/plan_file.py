"""Plan files: what :meth:`Plan.save` writes and :meth:`Plan.load` reads."""

from __future__ import annotations

import json
from pathlib import Path

from hybridremat.errors import PlanFormatError
from hybridremat.graph.whole_files import write_whole
from hybridremat.plan_codec import plan_from_dict, plan_to_dict
from hybridremat.plans import Plan


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON; the file appears complete or not at all.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    write_whole(Path(path), json.dumps(plan_to_dict(plan)) + "\n")


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
        return plan_from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 alike
        raise PlanFormatError(f"{path} is no plan: it is not JSON ({error})") from error
    except PlanFormatError as error:
        raise PlanFormatError(f"{path}: {error}") from error

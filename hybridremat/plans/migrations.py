"""Plan files of earlier schemas, changed into the current one where something was moved or renamed.

What a schema only added has a default: gradients that leave in the backward (5), certificates (6), what is
known of other sizes (8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Data = dict[str, Any]


def migrated(data: Data, schema: int) -> Data:
    """The plan of a file of some schema, as JSON types of the current one."""
    for version, change in _CHANGES:
        data = change(data) if schema <= version else data
    return data


def _with_origins(data: Data) -> Data:
    """Each graph of a step is for the model, inputs and device of the step."""
    own = [part if part["origin"]["device"] else part | {"origin": data["origin"]} for part in data["parts"]]
    return data | {"parts": own}


def _with_requests(data: Data) -> Data:
    """What was asked for is in one record; of earlier ones some is told by the rest of the plan."""
    moved = {name: data[name] for name in ("reserve", "forwards", "compiler")}
    told = {
        "cost_model": data["cost_model"],
        "policy": {pin["pattern"]: pin["action"] for pin in data["pins"]} or None,
        "graph_breaks": "plan" if data["parts"] else "error",
    }
    changed = {
        "request": data["request"] | moved | told,
        "parts": [_with_requests(part) for part in data["parts"]],
    }
    return {name: item for name, item in data.items() if name not in moved} | changed


_CHANGES: Sequence[tuple[int, Callable[[Data], Data]]] = ((6, _with_origins), (6, _with_requests))
"""What is changed in files of a schema and of earlier ones, in order."""

"""Plan files of earlier schemas, changed into the current one where something was moved or renamed.

What a schema only added has a default: gradients that leave in the backward (5), certificates (6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Data = dict[str, Any]


def migrated(data: Data, schema: int) -> Data:
    """The plan of a file of some schema, as JSON types of the current one."""
    for version, change in _CHANGES.items():
        data = change(data) if schema <= version else data
    return data


def _with_origins(data: Data) -> Data:
    """Each graph of a step is for the model, inputs and device of the step."""
    own = [part if part["origin"]["device"] else part | {"origin": data["origin"]} for part in data["parts"]]
    return data | {"parts": own}


_CHANGES: Mapping[int, Callable[[Data], Data]] = {6: _with_origins}
"""By schema, what is changed in its files and in those of earlier ones."""

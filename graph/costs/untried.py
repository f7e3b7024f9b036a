"""Kernels whose workspace is not known: they take no inputs that can be made up, or have effects.

Collectives are never tried either: what they take is known (:mod:`hybridremat.graph.costs.collectives`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from hybridremat.errors import UntriedKernelError
from hybridremat.graph.tracing.fx_nodes import has_effects, is_collective, source_line
from hybridremat.graph.tracing.signature import target_text
from hybridremat.graph.tracing.trace import TracedStep

Untried = Literal["error", "allow"]


def untried_error(step: TracedStep, refused: Mapping[int, str]) -> UntriedKernelError:
    """The error about ops that cannot be tried; ``refused``: by op what its kernel says of made-up inputs."""
    ops = "; ".join(dict.fromkeys(_text(step, op, why) for op, why in refused.items()))
    return UntriedKernelError(
        "what these kernels allocate while they run cannot be measured, and without it no limit can be kept: "
        f"{ops}. They take no inputs that hybridremat can make up. Where a plain step fails alike, "
        "its inputs do not fit the model: mind their dtypes. Else wrap the part of the model without them, "
        'or pass untried="allow" (--untried allow) to plan without counting it, and reserve= for what they '
        "may need"
    )


def untried_texts(step: TracedStep, refused: Mapping[int, str]) -> Iterator[str]:
    """What to tell of each op whose workspace is not counted."""
    for op, node in enumerate(step.op_nodes):
        if op in refused:
            yield _text(step, op, refused[op])
        elif has_effects(node) and not is_collective(node):  # what these take is known
            yield _text(step, op, "it has effects, and is never run to be measured")


def _text(step: TracedStep, op: int, why: str) -> str:
    node = step.op_nodes[op]
    line = source_line(node)
    return f"{target_text(node)}{f' at {line}' if line else ''} ({why})"

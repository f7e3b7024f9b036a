"""What the user asked for, validated before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridremat.errors import LimitError
from hybridremat.graph.costs import CostModel, cost_model
from hybridremat.limits import parse_bytes, parse_overhead, resolve_limit

GradOutputs = Literal["auto", "all"]


@dataclass(frozen=True)
class Settings:
    """A planning request. See :func:`hybridremat.wrap` for the meaning of each field."""

    memory_limit: int | str | None = None
    max_overhead: float | str | None = None
    reserve: int | str = 0
    cost_model: str | CostModel = "profile"
    hold_outputs: bool = False
    grad_outputs: GradOutputs = "auto"
    workers: int | None = None

    def validated(self, *, need_limit: bool) -> Settings:
        """These settings, or a typed error about the first one that cannot be used.

        Raises
        ------
        LimitError
            For a malformed limit, overhead or reserve, or neither limit nor overhead.
        CostModelError
            For an unknown cost model.
        """
        if self.memory_limit is not None:
            resolve_limit(self.memory_limit, 1 << 40)
        elif need_limit and self.max_overhead is None:
            raise LimitError(
                'neither memory_limit nor max_overhead is given; pass memory_limit="6GiB", '
                'memory_limit="50%" '
                "(of the plain step's memory) or max_overhead=0.1 (least memory at 10 % more time)"
            )
        if self.max_overhead is not None:
            parse_overhead(self.max_overhead)
        self.reserve_bytes()
        cost_model(self.cost_model)
        if self.workers is not None and (isinstance(self.workers, bool) or self.workers < 1):
            raise LimitError(
                f"workers={self.workers!r} is out of range: give a number of processes ≥ 1, or None"
            )
        if self.grad_outputs not in ("auto", "all"):
            raise LimitError(f'grad_outputs={self.grad_outputs!r} is not known; use "auto" or "all"')
        return self

    def reserve_bytes(self) -> int:
        """Bytes kept free for the caller's own code once the forward is over."""
        return parse_bytes(self.reserve, name="reserve")

    def overhead_limit(self) -> float | None:
        """Most overhead as a fraction, or None."""
        return None if self.max_overhead is None else parse_overhead(self.max_overhead)

    def limit_bytes(self, plain_peak: int) -> int | None:
        """The memory limit in bytes, or None."""
        return None if self.memory_limit is None else resolve_limit(self.memory_limit, plain_peak)

"""Which stage of the benchmark comes when, and how long it may take. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]

PATIENCE = 2.0  # a stage may take as many times its share of the time that is left


@dataclass(frozen=True)
class Stage:
    """One model with one method, in a process of its own."""

    model: str
    method: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model}/{self.method}"


def in_order(models: Sequence[str], methods: Sequence[str]) -> list[Stage]:
    """By the sum of both places: the first models get many methods, the first methods many models.

    A model's first method comes before its others.
    """
    places = [(i + j, i, j) for i in range(len(models)) for j in range(len(methods))]
    return [Stage(models[i], methods[j]) for _, i, j in sorted(places)]


def seconds_for(stages: Sequence[int], left: float, reserve: float = 0.0) -> float:
    """How long the first of some stages may take; 0 if what is left is not enough for it.

    Parameters
    ----------
    stages
        The least seconds of that stage and of those that follow.
    left
        Seconds until all must have ended.
    reserve
        Seconds of these that are kept for what comes behind all stages.
    """
    free = left - reserve
    least = stages[0]
    if free < least:
        return 0.0
    return min(free, max(least, PATIENCE * free * least / sum(stages)))


def ended(records: Sequence[Record]) -> set[Stage]:
    """The stages that ended well, in this run or in the one that it goes on with."""
    return {
        Stage(str(r["model"]), str(r["method"]))
        for r in records
        if r.get("kind") == "end" and r.get("status") == "done"
    }


def batch_of(model: str, records: Sequence[Record]) -> int | None:
    """The batch at which a model is compared; None if its eager stage has not found it."""
    found = [int(r["batch"]) for r in records if r.get("model") == model and r.get("kind") == "batch"]
    return found[-1] if found else None


def limit_for(model: str, limit: str, records: Sequence[Record]) -> int | str:
    """The limit of plans: a share is one of the eager peak, so all plans of a model have the same one."""
    eager = [r for r in records if (r.get("model"), r.get("method")) == (model, "eager")]
    peaks = [int(r["peak"]) for r in eager if "peak" in r]
    return int(float(limit[:-1]) / 100 * peaks[-1]) if limit.endswith("%") and peaks else limit


def not_reached(stages: Sequence[Stage], tried: Collection[Stage], records: Sequence[Record]) -> list[Stage]:
    """Stages that were neither tried nor done before."""
    done = ended(records)
    return [stage for stage in stages if stage not in tried and stage not in done]

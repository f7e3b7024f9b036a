"""One stage of the GPU benchmark: a model with one method, in this process, its figures as they come.

    python benchmarks/gpu_stage.py RECORDS < ORDER

The order is one line of JSON (:class:`gpu_steps.Order`). It is read once everything is imported, so that a
process can be started while another one still measures. Figures are appended to RECORDS, a line of JSON each.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_methods import METHODS
from gpu_models import BENCHES
from gpu_steps import Order, Steps
from torch import nn

import hybridremat
from hybridremat.analysis.batch_search import largest_fitting
from hybridremat.analysis.measure import loss_of, measure
from hybridremat.analysis.paired_steps import Subject, median_ratio, paired_seconds
from hybridremat.units import format_bytes

SHARE = 0.75  # of the largest batch of eager training: where methods are compared
MOST = 65536  # the largest batch that is looked for
PAIRS, FEWEST_PAIRS = 7, 3
TRIES = {"eager": 7}  # batches that are tried in the search for the largest one
OTHER_TRIES = 3


class OutOfTriesError(Exception):
    """Ends a search; what fits so far is known."""


class StageRun:
    """Measures one stage; ``tell`` is called with each figure."""

    def __init__(self, order: Order, tell: Callable[..., None]) -> None:
        self.order, self.tell, self.steps = order, tell, Steps(order)
        self.slowest = 0.0  # seconds: of preparing, or of trying another batch

    def run(self) -> None:
        """Find the batch if it is not known; then peak, times, and the largest batch."""
        batch = self.order.batch
        if batch is None:
            model, _ = self.steps.make(1)
            room, gradients = self.steps.room(model), _gradient_bytes(model)
            del model
            largest = self._search(room, {0: gradients})
            if not largest:
                raise RuntimeError(f"no batch was found that fits {format_bytes(room)}")
            batch = max(1, int(SHARE * largest))
            self.tell("batch", batch=batch, largest=largest, room=room)
        self._compare(batch)

    def _compare(self, batch: int) -> None:
        """Peak and times at one batch beside eager training, in pairs; then the largest batch."""
        model, inputs = self.steps.make(batch)
        room, gradients = self.steps.room(model), _gradient_bytes(model)
        plain = Subject(_twin(model), inputs, loss_of)
        started = time.monotonic()
        self.steps.prepare(model, inputs, self.order.limit)
        ours = Subject(model, inputs, loss_of)
        ours.step()
        self.steps.wait()
        self.slowest, planned = time.monotonic() - started, _plan_figures(model)
        self.tell("figures", batch=batch, prepared=self.slowest, **planned)
        measured = measure(model, kwargs=inputs, repeats=1)
        self.tell("figures", peak=measured.peak)
        self._pairs(plain, ours, batch)
        del plain, ours, model, inputs
        if self.order.method != "eager":
            # our plan took what it was allowed; what the batch needs is less
            need = planned.get("least", measured.peak)
            self._largest(room, {0: gradients, batch: need})

    def _pairs(self, plain: Subject, ours: Subject, batch: int) -> None:
        plain.step()  # what libraries do at their first call is over
        seconds: list[tuple[float, float]] = []
        for number in range(PAIRS):
            seconds += paired_seconds(plain, ours, 1, lambda: None)
            if number + 1 >= FEWEST_PAIRS and self.steps.left() < 0.4 * self.order.seconds:
                break
        taken = sorted(second for _, second in seconds)[len(seconds) // 2]
        rate = self.steps.rate(batch, taken)
        self.tell(
            "figures", ratio=median_ratio(seconds), pairs=len(seconds), seconds_a_step=taken, rate=rate
        )

    def _largest(self, room: int, known: dict[int, int]) -> None:
        largest = self._search(room, known)
        self.tell("figures", largest=largest)
        if self.steps.left() > self.slowest:
            model, inputs = self.steps.make(largest)
            self.steps.prepare(model, inputs, room)
            subject = Subject(model, inputs, loss_of)
            subject.step()
            ((_, taken),) = paired_seconds(subject, subject, 1, lambda: None)
            self.tell("figures", largest_rate=self.steps.rate(largest, taken))

    def _search(self, room: int, known: dict[int, int]) -> int:
        """The largest batch that was found to fit ``room`` bytes, as far as tries and time go."""
        answers, tries = dict(known), TRIES.get(self.order.method, OTHER_TRIES)

        def need(batch: int) -> int:
            late = self.steps.left() < max(2 * self.slowest, 0.2 * self.order.seconds)
            if late or len(answers) - len(known) >= tries:
                raise OutOfTriesError
            started = time.monotonic()
            answers[batch] = self.steps.need(batch, room)
            self.slowest = max(self.slowest, time.monotonic() - started)
            return answers[batch]

        try:
            return largest_fitting(need, room, known=known, start=1, most=MOST)
        except OutOfTriesError:
            return max((batch for batch, size in answers.items() if size <= room), default=0)


def _twin(model: nn.Module) -> nn.Module:
    """The same model with the same parameters and buffers, to be run plainly."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _plan_figures(model: nn.Module) -> dict[str, Any]:
    try:
        plan = hybridremat.get_plan(model)
    except hybridremat.ModelError:
        return {}
    assert plan.memory_limit is not None
    return {
        "limit": plan.memory_limit,
        "predicted": plan.predicted_peak,
        "least": plan.least_peak,
        "plain": plan.plain_peak,
        "overhead": plan.overhead,
        "timings": dict(plan.timings),
    }


def main() -> int:
    """Read the order, run it, and return 1 if it failed."""
    path = Path(sys.argv[1])
    order = Order(**json.loads(sys.stdin.readline()))

    def tell(kind: str, **figures: Any) -> None:
        record = {"model": order.model, "method": order.method, "kind": kind, **figures}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    bench, method = BENCHES[order.model], METHODS[order.method]
    tell("start", model_title=bench.title, method_title=method.title, unit=f"{bench.unit}/s")
    try:
        StageRun(order, tell).run()
    except Exception as error:  # noqa: BLE001 - whatever stops one stage is its result
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        tell("end", status="failed", why=f"{type(error).__name__}: {text}")
        return 1
    tell("end", status="done")
    return 0


if __name__ == "__main__":
    sys.exit(main())

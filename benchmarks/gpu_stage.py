"""One stage of the GPU benchmark: a model with one method, in this process, its figures as they come.

    python benchmarks/gpu_stage.py RECORDS < ORDER

The order is one line of JSON (:class:`Order`). It is read once everything is imported, so that a process can
be started while another one still measures. Figures are appended to RECORDS, a line of JSON each.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_methods import METHODS, Asked
from gpu_models import BENCHES
from torch import Tensor, nn

import hybridremat
from hybridremat.analysis.batch_search import largest_fitting
from hybridremat.analysis.measure import loss_of, measure
from hybridremat.analysis.paired_steps import Subject, median_ratio, paired_seconds

SHARE = 0.75  # of the largest batch of eager training: where methods are compared
ROOM_ON_CPU = 48 << 20  # bytes of the dry run, in place of what a card has left
MOST = 65536  # the largest batch that is looked for
PAIRS, FEWEST_PAIRS = 7, 3
TRIES = {"eager": 7}  # batches that are tried in the search for the largest one
OTHER_TRIES = 3


@dataclass(frozen=True)
class Order:
    """What to do: ``seconds`` until the process is ended; ``batch`` None: find the one to compare at."""

    model: str
    method: str
    device: str
    small: bool
    seconds: float
    batch: int | None
    limit: int | str
    workers: int | None


class OutOfTriesError(Exception):
    """Ends a search; what fits so far is known."""


class StageRun:
    """Measures one stage; ``tell`` is called with each figure."""

    def __init__(self, order: Order, tell: Callable[..., None]) -> None:
        self.order, self.tell = order, tell
        self.bench, self.method = BENCHES[order.model], METHODS[order.method]
        self.deadline = time.monotonic() + order.seconds
        self.asked = Asked(order.limit, self.bench.layer, order.workers)

    def run(self) -> None:
        """Find the batch if it is not known; then peak, times, and the largest batch."""
        batch = self.order.batch
        if batch is None:
            model, _ = self._make(1)
            room = self._room(model)
            del model
            largest = self._search(room, {})
            batch = max(1, int(SHARE * largest))
            self.tell("batch", batch=batch, largest=largest, room=room)
        self._compare(batch)

    def _compare(self, batch: int) -> None:
        """Peak and times at one batch beside eager training, in pairs; then the largest batch."""
        model, inputs = self._make(batch)
        room, gradients = self._room(model), _gradient_bytes(model)
        plain = Subject(_twin(model), inputs, loss_of)
        started = time.monotonic()
        self.method.prepare(model, inputs, self.asked)
        ours = Subject(model, inputs, loss_of)
        ours.step()
        self._wait()
        self.tell("figures", batch=batch, prepared=time.monotonic() - started, **_plan_figures(model))
        measured = measure(model, kwargs=inputs, repeats=1)
        self.tell("figures", peak=measured.peak)
        self._pairs(plain, ours, batch)
        del plain, ours, model, inputs
        if self.order.method != "eager":
            known = {0: gradients} if self.method.compiler else {0: gradients, batch: measured.peak}
            self._largest(room, known, batch)

    def _pairs(self, plain: Subject, ours: Subject, batch: int) -> None:
        plain.step()  # what libraries do at their first call is over
        seconds: list[tuple[float, float]] = []
        for number in range(PAIRS):
            seconds += paired_seconds(plain, ours, 1, lambda: None)
            if number + 1 >= FEWEST_PAIRS and self._left() < 0.4 * self.order.seconds:
                break
        taken = sorted(second for _, second in seconds)[len(seconds) // 2]
        rate = batch * self.bench.sample(small=self.order.small) / taken
        self.tell(
            "figures", ratio=median_ratio(seconds), pairs=len(seconds), seconds_a_step=taken, rate=rate
        )

    def _largest(self, room: int, known: dict[int, int], start: int) -> None:
        largest = self._search(room, known, start)
        self.tell("figures", largest=largest)
        if largest and self._left() > 0:
            model, inputs = self._make(largest)
            asked = Asked(room, self.bench.layer, self.order.workers)
            self.method.prepare(model, inputs, asked)
            subject = Subject(model, inputs, loss_of)
            subject.step()
            ((_, taken),) = paired_seconds(subject, subject, 1, lambda: None)
            rate = largest * self.bench.sample(small=self.order.small) / taken
            self.tell("figures", largest_rate=rate)

    def _search(self, room: int, known: dict[int, int], start: int = 1) -> int:
        """The largest batch that was found to fit ``room`` bytes, as far as tries and time go."""
        answers, tries = dict(known), TRIES.get(self.order.method, OTHER_TRIES)
        slowest = 0.0

        def need(batch: int) -> int:
            nonlocal slowest
            late = self._left() < max(2 * slowest, 0.2 * self.order.seconds)
            if late or len(answers) - len(known) >= tries:
                raise OutOfTriesError
            started = time.monotonic()
            answers[batch] = self._need(batch, room)
            slowest = max(slowest, time.monotonic() - started)
            return answers[batch]

        try:
            return largest_fitting(need, room, known=known, start=start, most=MOST)
        except OutOfTriesError:
            return max((batch for batch, size in answers.items() if size <= room), default=0)

    def _need(self, batch: int, room: int) -> int:
        """Bytes that a step of this batch takes; more than ``room`` where there is not enough memory."""
        model: nn.Module | None = None
        try:
            model, inputs = self._make(batch)
            if self.method.compiler:
                return self._least(model, inputs)
            self.method.prepare(model, inputs, self.asked)
            return measure(model, kwargs=inputs, repeats=1).peak
        except torch.OutOfMemoryError:
            return room + 1
        finally:
            if model is not None:
                self.method.undo(model)
            del model
            self._empty()

    def _least(self, model: nn.Module, inputs: dict[str, Tensor]) -> int:
        """The least that a plan takes; of a compiled step, what its code takes."""
        how: dict[str, Any] = {"kwargs": inputs, "workers": self.order.workers, "progress": False}
        if self.method.compiler == "eager":
            return hybridremat.plan(model, memory_limit="100000%", **how).least_peak
        how |= {"compiler": self.method.compiler, "on_infeasible": "least"}
        with warnings.catch_warnings(action="ignore", category=hybridremat.InfeasibleLimitWarning):
            return hybridremat.plan(model, memory_limit=1, **how).predicted_peak

    def _make(self, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
        self._empty()
        return self.bench.make(batch, self.order.device, small=self.order.small)

    def _room(self, model: nn.Module) -> int:
        """Bytes that are there for a step beside parameters and AdamW's state."""
        return hybridremat.auto_limit(model).limit if self.order.device == "cuda" else ROOM_ON_CPU

    def _empty(self) -> None:
        gc.collect()
        torch._dynamo.reset()
        if self.order.device == "cuda":
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self.order.device == "cuda":
            torch.cuda.synchronize()

    def _left(self) -> float:
        return self.deadline - time.monotonic()


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
    return {
        "limit": plan.memory_limit,
        "predicted": plan.predicted_peak,
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

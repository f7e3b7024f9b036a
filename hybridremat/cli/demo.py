"""The command ``demo``: real models trained plainly and under limits, side by side."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from torch import Tensor

from hybridremat.analysis.measure import measure
from hybridremat.analysis.paired_steps import Subject, adamw, differences, time_ratio, train
from hybridremat.api import get_plan, unwrap, wrap
from hybridremat.cli.demo_models import DEMO_MODELS, DemoModel
from hybridremat.cli.demo_report import make_folder, open_report, write_report
from hybridremat.cli.demo_table import IN_BACKWARD, OFFLOADED, DemoRow, demo_table, verdict
from hybridremat.cli.output import print_json
from hybridremat.errors import InfeasibleLimitError, TargetError
from hybridremat.integrations.optimizer_in_backward import optimizer_in_backward
from hybridremat.planning.plan import Plan
from hybridremat.planning.progress import planning_progress
from hybridremat.plans.request import Gradients
from hybridremat.reports.text import render
from hybridremat.units import format_bytes

EASY = "60%"
QUICK, QUICK_MODEL = "40%", "gpt2"
TIGHT = 1.03  # times the least feasible limit
PAIRS = 3  # of steps that are timed
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Reference:
    """A model trained plainly, which every planned training is compared with."""

    subject: Subject
    tensors: list[dict[str, Tensor]]
    peak: int


def run_demo(options: Namespace) -> int:
    """Run the demo, print its table, and return 1 if numbers differ or a limit was exceeded."""
    default = [QUICK_MODEL] if options.quick else [*DEMO_MODELS]
    names = options.models.split(",") if options.models else default
    unknown = [name for name in names if name not in DEMO_MODELS]
    if unknown:
        raise TargetError(f"no demo model {', '.join(unknown)}; there are {', '.join(DEMO_MODELS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise TargetError("--device cuda: torch sees no CUDA device here")
    if options.quick and len(names) > 1:
        raise TargetError(f"--quick trains one model, not {len(names)}: name one, or leave --models out")
    if options.output is not None and not options.quick:
        raise TargetError("-o is for what --quick writes: add --quick, or leave -o out")
    if options.steps < 1 or options.threads < 1:
        raise TargetError("--steps and --threads are 1 or more")
    # One thread: on a busy machine several mostly wait for one another, and ratios of times say little.
    # Planning uses all cores, in processes of its own.
    torch.set_num_threads(options.threads)
    models = [DEMO_MODELS[name] for name in names]
    if options.quick:
        rows = run_quick(models[0], options)
    else:
        rows = run_models(models, options.steps, options.cost_model, options.device, quiet=options.quiet)
    if options.json:
        print_json([asdict(row) for row in rows])
    else:
        render([demo_table(rows), *verdict(rows, options.steps)], sys.stdout)
    return 0 if all(row.passed for row in rows) else 1


def run_models(
    models: list[DemoModel],
    steps: int,
    cost_model: str = "profile",
    device: str = "cpu",
    *,
    quiet: bool = False,
) -> list[DemoRow]:
    """Train each model plainly, then under an easy and a tight limit; one row for each limit."""
    rows: list[DemoRow] = []
    for number, model in enumerate(models, start=1):
        title = f"{number}/{len(models)} {model.name}"
        rows += ModelDemo(model, steps, cost_model, device, title, quiet=quiet).rows()
    return rows


def run_quick(model: DemoModel, options: Namespace) -> list[DemoRow]:
    """Train one model plainly and under one limit, and write the report and the picture of that plan."""
    folder = make_folder(options.output or "hybridremat-demo")
    how = (options.steps, options.cost_model, options.device, model.name)
    demo = ModelDemo(model, *how, quiet=options.quiet)
    row, plan = demo.under(QUICK)
    written = write_report(plan, folder)
    demo.console.print(*(f"wrote {path}" for path in written), sep="\n", highlight=False, soft_wrap=True)
    open_report(written[0])
    return [row]


class ModelDemo:
    """One model of the demo."""

    def __init__(
        self, model: DemoModel, steps: int, cost_model: str, device: str, title: str, *, quiet: bool = False
    ) -> None:
        self.model, self.steps, self.cost_model, self.device = model, steps, cost_model, device
        self.title = title
        self.quiet = quiet
        self.console = Console(stderr=True, quiet=quiet)

    def rows(self) -> list[DemoRow]:
        """Train plainly, then at both limits; or under less than the least, as values wait elsewhere."""
        reference = self._train_plainly()
        if self.model.offload:
            return [self._row_offloaded(reference)]
        started = time.perf_counter()
        subject = self._fresh()
        reserve = self._reserve(subject)
        plan, note = self._easy_plan(subject, reserve)
        rows = [self._row(reference, subject, time.perf_counter() - started, note)]
        started = time.perf_counter()
        subject = self._fresh()
        plan = self._wrap(subject, int(TIGHT * plan.least_peak), reserve)
        note = "least feasible + 3 %"
        rows.append(self._row(reference, subject, time.perf_counter() - started, note))
        return [*rows, self._row_in_backward(reference)] if self.model.in_backward else rows

    def under(self, share: str) -> tuple[DemoRow, Plan]:
        """Train plainly, then under one limit, a share of the plain step; the row, and the plan."""
        reference = self._train_plainly()
        started = time.perf_counter()
        subject = self._fresh()
        plan, note = self._easy_plan(subject, self._reserve(subject), share)
        return self._row(reference, subject, time.perf_counter() - started, note), plan

    def _row_offloaded(self, reference: Reference) -> DemoRow:
        """Train under a limit that nothing keeps unless values may wait elsewhere."""
        started = time.perf_counter()
        with TemporaryDirectory() as folder:
            where = f"file:{folder}" if self.device == "cpu" else "host"
            subject = self._fresh()
            least = self._wrap(subject, "1000%", 0).least_peak
            unwrap(subject.model)
            with_moves = self._wrap(subject, least, 0, offload=where).least_peak
            unwrap(subject.model)
            self._wrap(subject, (least + with_moves) // 2, 0, offload=where)
            return self._row(reference, subject, time.perf_counter() - started, OFFLOADED)

    def _row_in_backward(self, reference: Reference) -> DemoRow:
        """Train with the optimizer in the backward, against plain training with an ordinary one."""
        started = time.perf_counter()
        subject = self._fresh()
        subject = replace(subject, optimizer=optimizer_in_backward(subject.model, adamw))
        least = self._wrap(subject, "1000%", 0, gradients="in_backward").least_peak
        unwrap(subject.model)
        self._wrap(subject, int(TIGHT * least), 0, gradients="in_backward")
        seconds = time.perf_counter() - started
        ordinary = adamw(list(reference.subject.model.parameters()))
        subjects = replace(reference, subject=replace(reference.subject, optimizer=ordinary))
        return self._row(subjects, subject, seconds, IN_BACKWARD)

    def _fresh(self) -> Subject:
        model, batch, loss_fn = self.model.make()
        return Subject(model.to(self.device), {k: t.to(self.device) for k, t in batch.items()}, loss_fn)

    def _train_plainly(self) -> Reference:
        subject = self._fresh()
        tensors, peaks = [], []
        with self._bar("training plainly", self.steps) as advance:
            for kept, peak in train(subject, self.steps):
                tensors.append(kept)
                peaks.append(peak)
                advance()
        self._log(f"trained {self.steps} steps plainly, peak {format_bytes(max(peaks))}")
        return Reference(subject, tensors, max(peaks))

    def _reserve(self, subject: Subject) -> int:
        """Bytes, in whole MiB, that a loss outside the model takes: measured, as a user would."""
        if not self.model.loss_outside:
            return 0
        self._wrap(subject, "100%", 0)
        outside = measure(subject.model, kwargs=subject.batch, loss_fn=subject.loss_fn, repeats=1).outside
        unwrap(subject.model)
        reserve = -(-outside // MEBIBYTE) * MEBIBYTE
        self._log(f"the loss outside takes {format_bytes(outside)}: reserve {format_bytes(reserve)}")
        return reserve

    def _easy_plan(self, subject: Subject, reserve: int, share: str = EASY) -> tuple[Plan, str]:
        try:
            return self._wrap(subject, share, reserve), share
        except InfeasibleLimitError as error:
            plain = self._wrap(subject, "1000%", reserve).plain_peak
            unwrap(subject.model)
            middle = (error.least + max(plain, error.least)) // 2
            return self._wrap(subject, middle, reserve), f"half-way: {share} is not feasible"

    def _wrap(
        self,
        subject: Subject,
        limit: int | str,
        reserve: int,
        gradients: Gradients = "at_end",
        offload: str | None = None,
    ) -> Plan:
        started = time.perf_counter()
        wrap(
            subject.model,
            kwargs=subject.batch,
            memory_limit=limit,
            reserve=reserve,
            gradients=gradients,
            offload=offload,
            cost_model=self.cost_model,
            progress=not self.quiet,
        )
        plan = get_plan(subject.model)
        assert plan.memory_limit is not None
        self._log(f"planned for {format_bytes(plan.memory_limit)} in {time.perf_counter() - started:.1f} s")
        return plan

    def _row(self, reference: Reference, planned: Subject, seconds: float, note: str) -> DemoRow:
        plan = get_plan(planned.model)
        assert plan.memory_limit is not None
        differing: list[str] = []
        peaks = []
        # the first step in which an optimizer steps makes its state, too: one more is measured in its place
        more = int(planned.optimizer is not None)
        steps = self.steps + more
        with self._bar(f"training under {format_bytes(plan.memory_limit)}", steps + PAIRS) as advance:
            for number, (tensors, peak) in enumerate(train(planned, steps)):
                if number < self.steps:
                    names = differences(tensors, _comparable(reference.tensors[number], planned))
                    differing += [f"step {number + 1}: {name}" for name in names]
                peaks += [peak] if number >= more else []
                advance()
            ratio = time_ratio(reference.subject, planned, PAIRS, advance)
        self._log(f"trained {self.steps} steps under it, peak {format_bytes(max(peaks))}")
        return DemoRow(
            model=self.model.name,
            note=note,
            plain_eager_peak=reference.peak,
            plain_peak=plan.plain_peak,
            limit=plan.memory_limit,
            reserve=plan.reserve,
            predicted_peak=plan.predicted_peak,
            needed=plan.needed,
            measured_peak=max(peaks),
            overhead=plan.overhead,
            extra_flops=plan.extra_flops,
            time_ratio=ratio,
            planning_seconds=seconds,
            differing=tuple(differing),
        )

    def _log(self, text: str) -> None:
        self.console.print(f"{self.title}: {text}", highlight=False, soft_wrap=True)

    @contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        steps, text = count(1), f"{self.title}: {what}"
        with planning_progress(show=not self.quiet) as report:
            report(text, 0, total)
            yield lambda: report(text, next(steps), total)


def _comparable(tensors: dict[str, Tensor], planned: Subject) -> dict[str, Tensor]:
    """What a step has to equal: gradients are gone where the optimizer steps in the backward."""
    early = planned.optimizer is not None
    return {name: each for name, each in tensors.items() if not (early and name.startswith("gradient "))}

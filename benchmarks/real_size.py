"""GPT-2 124M at real size: memory of the process and of the step, plain, checkpointed and planned.

    python benchmarks/real_size.py [--batch N] [--length N] [--limit SHARE] [--cap SIZE] [--pairs N] [--pages]

Trains three times from the same weights and batch, each in a process of its own: plain, with each of the
twelve blocks checkpointed, and planned. Each process has a capped data segment (``RLIMIT_DATA``, which counts
all its private writable memory); one that fails under it, planning or training, starts again without. Their
steps take turns, so that CPU times are compared in pairs. *Resident* is the most that the process had
(``VmHWM``, set back after the first step), *step* the bytes that PyTorch's profiler counts in the first
forward and backward. Rows go to ``data/real_size.csv``, the table from them to docs/benchmarks.md;
``--pages`` does only that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from generated import Row, circumstances, days, loads, read_rows, versions, write_part, write_rows

SCRIPT: Final = "real_size.py"
ROWS: Final = Path(__file__).with_name("data") / "real_size.csv"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
COLUMNS: Final = (
    *("way", "batch", "length", "limit", "resident", "preparing", "step", "predicted", "overhead", "ratio"),
    *("seconds", "loss", "pairs", "cap", "under_cap", "load", "date", "torch"),
)
WAYS: Final = ("plain", "checkpoint", "planned")
TITLES: Final = {"plain": "plain", "checkpoint": "each block checkpointed", "planned": "`hybridremat`"}
FITS, FAILS = "fits", "fails"
MEMORY_ERRORS: Final = ("can't allocate memory", "not enough memory", "MemoryError", "Cannot allocate memory")


class Training:
    """GPT-2 124M trained one of three ways, with AdamW."""

    def __init__(self, way: str, batch: int, length: int, limit: str) -> None:
        import torch

        import hybridremat
        from hybridremat.zoo.models import reference_model

        size = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
        torch.set_num_threads(1)
        self.model, self.batch = reference_model("gpt2", 0.1, {**size, "batch": batch, "length": length})
        if way == "checkpoint":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        if way == "planned":
            hybridremat.wrap(self.model, kwargs=self.batch, memory_limit=limit, progress=False)
            plan = hybridremat.get_plan(self.model)
            self.figures = {"predicted": plan.predicted_peak, "overhead": round(plan.overhead, 4)}
        else:
            self.figures = {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        torch.manual_seed(1)

    def step(self, *, profiled: bool = False) -> dict[str, float]:
        """One step: its loss, its CPU seconds, and, by the profiler's records, its bytes."""
        from hybridremat.graph.costs.allocations import peaks_of

        losses = []

        def forward_and_backward() -> None:
            loss = self.model(**self.batch).loss
            loss.backward()
            losses.append(loss.item())

        started = time.process_time()
        found = {}
        if profiled:
            ((found["step"], _),) = peaks_of([lambda: forward_and_backward], "cpu")
        else:
            forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": losses[0], "seconds": time.process_time() - started, **found}


def resident_peak() -> int:
    """The most bytes that this process has had since :func:`reset_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> None:
    """Set back the most that this process has had."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def answer(options: argparse.Namespace) -> None:
    """Train two steps, and one more for each line of the standard input; answer each with a line of JSON."""
    if options.cap:
        resource.setrlimit(resource.RLIMIT_DATA, (options.cap, options.cap))
    training = Training(options.way, options.batch, options.length, options.limit)
    found = {"preparing": resident_peak(), **training.figures}
    first = training.step(profiled=True)  # the second step is the first one beside AdamW's state
    reset_peak()
    losses = [first["loss"], training.step()["loss"]]
    print(json.dumps({**found, "step": first["step"], "loss": losses}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({**training.step(), "resident": resident_peak()}), flush=True)


class Child:
    """A process that trains one way."""

    def __init__(self, way: str, options: argparse.Namespace, cap: int, folder: str) -> None:
        arguments = [f"--{name}={getattr(options, name)}" for name in ("batch", "length", "limit")]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed on exit)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--way", way, "--cap", str(cap), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HYBRIDREMAT_CACHE": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def read(self) -> dict[str, Any]:
        """The next answer.

        Raises
        ------
        MemoryError
            If the process ended for want of memory.
        RuntimeError
            If it ended for another reason, with the end of what it said.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read()
        kind = MemoryError if any(each in said for each in MEMORY_ERRORS) else RuntimeError
        raise kind(said[-2000:])

    def step(self) -> dict[str, Any]:
        """What one more step came to; raises as :meth:`read`."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()


def started(way: str, options: argparse.Namespace, folder: str, stack: ExitStack) -> tuple[Child, Row]:
    """A process that has trained two steps, under the cap if they fit there."""
    for cap, outcome in ((options.cap, FITS), (0, FAILS)):
        child = stack.enter_context(Child(way, options, cap, folder))
        try:
            return child, {**child.read(), "under_cap": outcome}
        except MemoryError as error:
            sys.stderr.write(f"{way} fails under {cap} bytes: {str(error).splitlines()[-1]}\n")
            if not cap:
                raise
    raise AssertionError


def measured(options: argparse.Namespace, folder: str) -> Iterator[Row]:
    """A row of figures for each way."""
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        found = {way: started(way, options, folder, stack) for way in WAYS}
        turns = [{way: child.step() for way, (child, _) in found.items()} for _ in range(options.pairs)]
    for way, (_, first) in found.items():
        steps = [turn[way] for turn in turns]
        ratios = [turn[way]["seconds"] / turn["plain"]["seconds"] for turn in turns]
        yield {
            "way": way,
            **{name: getattr(options, name) for name in ("batch", "length", "pairs", "cap")},
            "limit": options.limit if way == "planned" else "",
            **first,
            "resident": steps[-1]["resident"],
            "ratio": round(statistics.median(ratios), 3),
            "seconds": round(statistics.median(step["seconds"] for step in steps), 1),
            "loss": json.dumps([*first["loss"], *(step["loss"] for step in steps)]),
            **circumstances(load),
        }


def gib(text: str) -> str:
    """Bytes in GiB."""
    return f"{int(text) / 2**30:.2f} GiB"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the three ways."""
    yield "| | resident, most | step | time of a step | losses | under the cap |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        name = TITLES[row["way"]] + (f", {row['limit'].replace('%', ' %')}" if row["limit"] else "")
        equal = "equal" if row["loss"] == rows[0]["loss"] else "differ"
        yield (
            f"| {name} | {gib(row['resident'])} | {gib(row['step'])} | {float(row['ratio']):.2f} | {equal} "
            f"| {row['under_cap']} |"
        )


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    first, planned = rows[0], rows[-1]
    return "\n".join(
        (
            f"`python benchmarks/real_size.py`: GPT-2 124M, dropout 0.1, batch {first['batch']} × "
            f"{first['length']} tokens, float32, AdamW, {days(rows)}, {versions(rows)}, one thread, 2 cores "
            f"with {loads(rows)}, cost model `profile`. *Resident*: `VmHWM` of the process in steps, "
            "parameters and AdamW's state in it. *Step*: the profiler's bytes of forward and backward "
            f"(predicted: {gib(planned['predicted'])}). *Time*: CPU time over plain's, the median of "
            f"{first['pairs']} steps in turn (predicted: {1 + float(planned['overhead']):.2f}). *Losses*: "
            f"those of {len(json.loads(first['loss']))} steps, bit for bit. *Under the cap*: planning and "
            f"two steps with `RLIMIT_DATA` at {gib(first['cap'])}.",
            "",
            *table(rows),
        )
    )


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--limit", default="40%")
    parser.add_argument("--cap", type=int, default=6 << 30, help="bytes")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--pages", action="store_true", help="only write the page from the rows")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        answer(options)
        return
    if not options.pages:
        with tempfile.TemporaryDirectory() as folder:
            write_rows(ROWS, COLUMNS, list(measured(options, folder)))
    write_part(PAGE, SCRIPT, part(read_rows(ROWS)))


if __name__ == "__main__":
    main()

"""Training on a GPU: peak, time, throughput and largest batch, for ours, checkpointing and torch.compile.

    python benchmarks/gpu.py [--device cuda] [--seconds 480] [--out build/gpu] [--models A,B] [--methods A,B]
    python benchmarks/gpu.py --device cpu --small         # the same stages on tiny models: two minutes

Each model with each method is a stage, in a process of its own that is ended at its limit. Results are
written as they come: ``benchmark.jsonl`` grows line by line, ``benchmark.json`` and ``benchmark.md`` are
written anew after each stage. What was not reached in time is named; ``--resume`` goes on with it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_child import Child, about_this, read_records
from gpu_methods import METHODS
from gpu_models import BENCHES
from gpu_schedule import Record, Stage, batch_of, ended, in_order, limit_for, not_reached, seconds_for
from gpu_table import LEGEND, markdown_of, rows_of, table_of
from rich.text import Text

from hybridremat.files import write_atomic
from hybridremat.reports.text import render

SECONDS, SMALL_SECONDS = 480.0, 110.0
SMALL_SHARE = 0.35  # of the least seconds of a stage, for tiny models
CLOSING = 3.0  # seconds kept for the table


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--small", action="store_true", help="tiny models of the same families, float32")
    add("--seconds", type=float, help=f"for all (default: {SECONDS:.0f}; with --small {SMALL_SECONDS:.0f})")
    add("--out", type=Path, default=Path("build/gpu"), help="folder of the results")
    add("--models", help="some of those in gpu_models.py, by commas")
    add("--methods", help="some of those in gpu_methods.py, by commas; eager comes first in any case")
    add("--limit", default="50%", help="of our plans: a size, or a share of eager's peak (default: 50%%)")
    add("--workers", type=int, help="processes that plan (default: one a core)")
    add("--resume", action="store_true", help="keep the results in --out, and do what is missing")
    return parser.parse_args(arguments)


class Run:
    """All stages, within one time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + (options.seconds or (SMALL_SECONDS if options.small else SECONDS))
        models = _chosen(options.models, list(BENCHES))
        methods = ["eager", *(m for m in _chosen(options.methods, list(METHODS)) if m != "eager")]
        self.stages = in_order(models, methods)
        options.out.mkdir(parents=True, exist_ok=True)
        self.records_path, self.log = options.out / "benchmark.jsonl", options.out / "benchmark.log"
        if options.resume:
            with self.records_path.open("a", encoding="utf-8") as file:
                file.write("\n")
        else:
            for path in (self.records_path, self.log):
                path.unlink(missing_ok=True)
        self.about = about_this(options.device, options.limit, small=options.small)
        # On a machine with cores to spare a process is started ahead, so that its imports take no time.
        self.ahead = options.device == "cuda"
        self.tried: set[Stage] = set()
        self.waiting: Child | None = None

    def run(self) -> list[Record]:
        """Run what the time suffices for; returns all records."""
        done = ended(self.records())
        todo = [stage for stage in self.stages if stage not in done]
        try:
            for number, stage in enumerate(todo):
                self._stage(stage, todo[number:])
                self.write()
        finally:
            if self.waiting is not None:
                self.waiting.end()
        self.write()
        return self.records()

    def _stage(self, stage: Stage, rest: list[Stage]) -> None:
        batch = batch_of(stage.model, self.records())
        if batch is None and stage.method != "eager":
            return  # nothing to compare at: its eager stage was not reached, or failed
        seconds = seconds_for([self._least(s) for s in rest], self.deadline - time.monotonic(), CLOSING)
        if not seconds:
            return
        child = self.waiting or Child.start(self.records_path, self.log)
        more = self.ahead and len(rest) > 1
        self.waiting = Child.start(self.records_path, self.log) if more else None
        self.tried.add(stage)
        started = time.monotonic()
        o = self.options
        limit = limit_for(stage.model, o.limit, self.records())
        order = {"device": o.device, "small": o.small, "limit": limit, "workers": o.workers}
        in_time = child.run({**asdict(stage), **order, "seconds": seconds, "batch": batch})
        self._close(stage, child, in_time, time.monotonic() - started)

    def _close(self, stage: Stage, child: Child, in_time: bool, seconds: float) -> None:
        """Write how a stage ended if it could not do so itself."""
        last = [r for r in self.records() if (r["model"], r["method"]) == (stage.model, stage.method)]
        if not last or last[-1]["kind"] != "end":
            why = f"ended after {seconds:.0f} s" if not in_time else f"exit status {child.process.returncode}"
            self._add({**asdict(stage), "kind": "end", "status": "stopped" if not in_time else "failed"}, why)
        status = self.records()[-1].get("status")
        print(f"{stage.name}: {status}, {seconds:.0f} s", flush=True)

    def _least(self, stage: Stage) -> int:
        least = METHODS[stage.method].least_seconds
        return int(SMALL_SHARE * least) if self.options.small else least

    def _add(self, record: dict[str, Any], why: str) -> None:
        with self.records_path.open("a", encoding="utf-8") as file:
            # on a line of its own, also behind half a line of a process that was ended as it wrote
            file.write("\n" + json.dumps({**record, "why": why}) + "\n")

    def records(self) -> list[Record]:
        """All records so far; half a line, of a process that was ended, is left out."""
        return read_records(self.records_path)

    def missing(self) -> list[str]:
        """Names of the stages that were not reached."""
        return [stage.name for stage in not_reached(self.stages, self.tried, self.records())]

    def write(self) -> None:
        """Write the results so far."""
        rows, about = rows_of(self.records()), self.about
        data = {"about": about, "rows": rows, "not_reached": self.missing()}
        write_atomic(self.options.out / "benchmark.json", json.dumps(data, indent=1) + "\n")
        write_atomic(self.options.out / "benchmark.md", markdown_of(rows, about, self.missing()))


def _chosen(text: str | None, names: list[str]) -> list[str]:
    asked = text.split(",") if text else names
    unknown = [name for name in asked if name not in names]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: there is no such name; there are {', '.join(names)}")
    return asked


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a stage failed."""
    options = options_of(arguments)
    run = Run(options)
    records = run.run()
    rows = rows_of(records)
    render([table_of(rows), Text(LEGEND, style="dim")], sys.stdout)
    print(f"Not reached: {', '.join(run.missing()) or 'nothing'}.")
    failed = [row for row in rows if row.get("status") == "failed"]
    for row in failed:
        print(f"Failed: {row['model']}/{row['method']}: {row.get('why')}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

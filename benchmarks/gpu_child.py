"""The process of a stage, seen from outside; what it has written; and what its figures depend on."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_schedule import Record

HERE = Path(__file__).parent


@dataclass
class Child:
    """A process that waits for its order."""

    process: subprocess.Popen[str]

    @staticmethod
    def start(records: Path, log: Path) -> Child:
        """Start one; it imports what it needs meanwhile."""
        with log.open("a", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "gpu_stage.py"), str(records)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # planning and compiling have processes of their own, to end with it
            )
        return Child(process)

    def run(self, order: dict[str, Any]) -> bool:
        """Give the order and wait; False if it had to be ended, after its seconds."""
        order = {**order, "until": time.time() + order["seconds"]}
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it failed to start; its status says so
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.close()
        try:
            self.process.wait(order["seconds"])
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.end()
        return True

    def end(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def read_records(path: Path) -> list[Record]:
    """The complete records of a file; none if it is not there."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in found if isinstance(record, dict)]


def about_this(device: str, limit: str, *, small: bool) -> dict[str, Any]:
    """What the figures depend on."""
    found: dict[str, Any] = {"device": device, "limit of plans": limit}
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:  # not by torch: this process leaves the device alone
            found["GPU"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            found["GPU"] = "unknown"
    found["cores"], found["python"] = os.cpu_count(), platform.python_version()
    for package in ("torch", "transformers", "triton", "ortools", "hybridremat"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["sizes"] = "tiny, float32" if small else "full, bfloat16"
    return found

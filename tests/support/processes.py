"""Run a function on several ranks of a gloo process group, each in a process of its own.

``run_ranks("module:function", folder)`` starts the processes; this file is also what they run. A rank that
hangs ends the test: all of them are killed when the time is over.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def run_ranks(
    target: str,
    folder: Path,
    *,
    size: int = 2,
    timeout: float = 280.0,
    port: bool = False,
    fake: int = 0,
    backend: str = "gloo",
) -> list[dict]:
    """What the function returned on each rank (as JSON); it is called with the rank.

    ``timeout`` in seconds is for all ranks together. They meet at a file, or at a free ``port``. With
    ``fake``, one process is the first of so many ranks, and collectives do nothing: for bytes.
    """
    method = f"tcp://127.0.0.1:{_free_port()}" if port else f"file://{folder / 'rendezvous'}"
    size, method = (1, f"fake:{fake}") if fake else (size, method)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    given = [size, folder, timeout, method, backend]
    started = [_start([target, rank, *given], environment) for rank in range(size)]
    deadline = time.monotonic() + timeout
    try:
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        codes = ["hangs"]
    finally:
        for process in started:
            process.kill()
            process.wait(30)
    said = "\n".join(f"--- rank {r}\n{_log(folder, r).read_text()[-6000:]}" for r in range(size))
    assert codes == [0] * size, f"{target}: {codes}\n{said}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def run_ranks_once(target: str, folders: pytest.TempPathFactory, **how: Any) -> list[dict]:
    """As :func:`run_ranks`, for all of pytest's workers: one runs it, and the others read what it made."""
    from filelock import FileLock  # not on each rank

    root = folders.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    made = root / f"{target.replace(':', '-')}-{how.get('fake', 0)}.json"
    with FileLock(f"{made}.lock"):
        if not made.exists():
            made.write_text(json.dumps(run_ranks(target, Path(tempfile.mkdtemp(dir=root)), **how)))
        found: list[dict] = json.loads(made.read_text())
    return found


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def _start(arguments: list, environment: dict) -> subprocess.Popen:
    _, rank, _, folder, *_ = arguments
    command = [sys.executable, "-m", "support.processes", *map(str, arguments)]
    with _log(folder, rank).open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main(
    target: str, rank: int, size: int, folder: Path, timeout: float, method: str, backend: str
) -> None:
    """One rank; shortly before it would be killed it says where it hangs."""
    faulthandler.dump_traceback_later(timeout - 5, exit=True)
    import torch

    torch.set_num_threads(1)
    kind, _, ranks = method.partition(":")
    if kind == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(ranks))
    else:
        torch.distributed.init_process_group(
            backend,
            init_method=method,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    module, _, name = target.partition(":")
    result = getattr(import_module(module), name)(rank)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(
        0
    )  # a DistributedDataParallel that something still holds can hang in the interpreter's last steps


if __name__ == "__main__":
    target, rank, size, folder, timeout, *how = sys.argv[1:]
    main(target, int(rank), int(size), Path(folder), float(timeout), *how)

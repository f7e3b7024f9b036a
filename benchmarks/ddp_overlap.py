"""DistributedDataParallel over a slow link: the step of a planned model beside the plain one's.

    python benchmarks/ddp_overlap.py [--limits 100% 60%] [--steps 15]

Two processes with gloo, one thread each. A communication hook averages each bucket, and a link that sends one
bucket after the other completes it after a time proportional to its bytes, so that all of them take as long
as the plain backward. Steps of the two models take turns; what is printed is the median of the ratios of
neighbours, with the quarters, for each limit, with a link of no delay and with the slow one.
"""

import argparse
import copy
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.futures import Future
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

RANKS: Final = 2
WIDTH: Final = 384
LAYERS: Final = 12
ROWS: Final = 1024
BUCKET_MB: Final = 1


class Net(nn.Module):
    """Residual layers with dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = x + functional.dropout(functional.gelu(layer(x)), 0.1)
        return x.pow(2).mean()


class Link:
    """Sends buckets one after the other; ``seconds`` for each byte."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._waiting: queue.SimpleQueue[tuple[Any, Tensor, Future[Tensor], float]] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    def hook(self, _: object, bucket: distributed.GradBucket) -> Future[Tensor]:
        """A communication hook of DistributedDataParallel."""
        buffer, done = bucket.buffer(), Future()
        work = distributed.all_reduce(buffer, async_op=True)
        self._waiting.put((work, buffer, done, time.monotonic()))
        return done

    def _send(self) -> None:
        free = 0.0
        while True:
            work, buffer, done, came = self._waiting.get()
            free = max(free, came) + self.seconds * buffer.nbytes
            work.wait()
            time.sleep(max(0.0, free - time.monotonic()))
            done.set_result(buffer.div_(RANKS))


class Training:
    """A model in DistributedDataParallel over a link."""

    def __init__(self, model: nn.Module) -> None:
        self.link = Link()
        self.parallel = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        self.parallel.register_comm_hook(None, self.link.hook)

    def step(self, x: Tensor) -> tuple[float, float]:
        """Seconds of a step and of its backward."""
        distributed.barrier()
        started = time.perf_counter()
        loss = self.parallel(x)
        middle = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        self.parallel.zero_grad()
        return ended - started, ended - middle


def here(rank: int, place: str, limits: list[str], steps: int) -> None:
    """What each rank does; the first one prints."""
    import hybridremat

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    plain = Training(copy.deepcopy(model))
    free = [plain.step(x) for _ in range(8)][3:]
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    rate = torch.tensor([min(each[1] for each in free) / size], dtype=torch.float64)
    distributed.broadcast(rate, 0)
    for limit in limits:
        planned = copy.deepcopy(model)
        how = {"cost_model": "flops", "workers": 1, "progress": False}
        ours = Training(hybridremat.wrap(planned, (x,), memory_limit=limit, **how))
        for name, seconds in (("no delay", 0.0), ("slow link", rate.item())):
            ours.link.seconds = plain.link.seconds = seconds
            for _ in range(3):
                ours.step(x)
            pairs = [(ours.step(x)[0], plain.step(x)[0]) for _ in range(steps)]
            low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
            alone = 1e3 * statistics.median(b for _, b in pairs)
            if rank == 0:
                print(f"{limit}, {name}: {middle:.3f} ({low:.3f} to {high:.3f}) of plain's {alone:.0f} ms")
    distributed.barrier()
    os._exit(0)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--limits", nargs="+", default=["100%", "60%"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--here", nargs=2, metavar=("RANK", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        here(int(asked.here[0]), asked.here[1], asked.limits, asked.steps)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--steps", str(asked.steps), "--limits", *asked.limits]
        place = str(Path(folder) / "group")
        ranks = [subprocess.Popen([*command, "--here", str(rank), place]) for rank in range(RANKS)]
        sys.exit(max(abs(each.wait()) for each in ranks))


if __name__ == "__main__":
    main()

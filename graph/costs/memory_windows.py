"""Memory of stretches of code that are opened and closed by hand: their peak, and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from hybridremat.graph.costs.allocations import record_allocations, span


class Windows:
    """Named stretches of one run on a device, one open at a time.

    Attributes
    ----------
    figures
        For each window, bytes above its start: the most, and what was left at its end. There once
        :meth:`record` has returned.
    """

    def __init__(self, device: str) -> None:
        self.figures: dict[str, tuple[int, int]] = {}
        self._cuda = device == "cuda"
        self._open: tuple[str, AbstractContextManager[None], int] | None = None

    def open(self, name: str) -> None:
        """Start a window."""
        mark, level = span(name), 0
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            level = torch.cuda.memory_allocated()
        mark.__enter__()
        self._open = name, mark, level

    def close(self) -> None:
        """End the window that is open."""
        assert self._open is not None, "no window is open"
        name, mark, level = self._open
        mark.__exit__(None, None, None)
        self._open = None
        if self._cuda:
            torch.cuda.synchronize()
            most = torch.cuda.max_memory_allocated() - level
            self.figures[name] = (most, torch.cuda.memory_allocated() - level)

    def record(self, run: Callable[[], None]) -> None:
        """Run a function that opens and closes windows."""
        if self._cuda:
            run()
            return
        trace = record_allocations(run)
        for name, (start, end) in trace.spans.items():
            self.figures[name] = trace.peak(start, end)

"""A memory recorder for CUDA: the caching allocator's own counters, read at each mark.

The counters change when the host allocates and frees, so nothing waits for the device. What the allocator
counts for a tensor depends on what it holds: a large block with up to 1 MiB to spare is not split. What was
asked for does not, and rounded up for each tensor it is what one takes in a block of its own: where that is
less, it counts.
"""

from __future__ import annotations

import torch

from hybridremat.graph.costs.recorder import FREEING, Recording, Segment
from hybridremat.graph.tracing.fx_nodes import CUDA_ALLOCATION


def _counters(kind: str) -> tuple[int, int, int]:
    """Bytes as the allocator counts them, as they were asked for, and the number of tensors."""
    stats = torch.cuda.memory_stats()
    names = "allocated_bytes.all", "requested_bytes.all", "allocation.all"
    counted, asked, tensors = (int(stats.get(f"{name}.{kind}", 0)) for name in names)
    return counted, asked, tensors


class CudaRecorder:
    """See :class:`~hybridremat.graph.costs.recorder.MemoryRecorder`; resets the allocator's peak."""

    def start(self) -> None:
        """See the protocol."""
        torch.cuda.reset_peak_memory_stats()
        self._before = _counters("current")
        self._segments: list[Segment] = []
        self._name, self._level = "", 0

    def mark(self, name: str) -> None:
        """See the protocol."""
        peak, end = self._above("peak"), self._above("current")
        self._segments.append(Segment(self._name, self._level, peak, end))
        self._name, self._level = name, end
        torch.cuda.reset_peak_memory_stats()

    def _above(self, kind: str) -> int:
        """Bytes above the start: as counted, or as asked for and rounded up, whichever is less."""
        counted, asked, tensors = (
            now - before for now, before in zip(_counters(kind), self._before, strict=True)
        )
        return min(counted, asked + (CUDA_ALLOCATION - 1) * max(0, tensors))

    def stop(self) -> Recording:
        """See the protocol."""
        self.mark("")
        freed = highest = 0
        for segment in self._segments:
            if segment.name == FREEING:
                freed += segment.start - segment.end
            else:
                highest = max(highest, segment.peak + freed)
        return Recording(tuple(self._segments), highest)

    def give_up(self) -> None:
        """See the protocol; the counters run anyway."""

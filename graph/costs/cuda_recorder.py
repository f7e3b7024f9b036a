"""A memory recorder for CUDA: the caching allocator's own counters, read at each mark.

The counters change when the host allocates and frees, so nothing waits for the device.
"""

from __future__ import annotations

import torch

from hybridremat.graph.costs.recorder import FREEING, Recording, Segment


class CudaRecorder:
    """See :class:`~hybridremat.graph.costs.recorder.MemoryRecorder`; resets the allocator's peak."""

    def start(self) -> None:
        """See the protocol."""
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        self._segments: list[Segment] = []
        self._name, self._level = "", 0

    def mark(self, name: str) -> None:
        """See the protocol."""
        peak = torch.cuda.max_memory_allocated() - self._before
        end = torch.cuda.memory_allocated() - self._before
        self._segments.append(Segment(self._name, self._level, peak, end))
        self._name, self._level = name, end
        torch.cuda.reset_peak_memory_stats()

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

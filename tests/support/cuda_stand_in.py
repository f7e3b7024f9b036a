"""What stands in for a CUDA device in tests on machines without one."""

from __future__ import annotations


class Allocator:
    """Stands in for torch.cuda: a level, and its highest since the last reset."""

    def __init__(self):
        self.level = self.highest = 0

    def allocate(self, size):
        self.level += size
        self.highest = max(self.highest, self.level)

    def reset_peak_memory_stats(self):
        self.highest = self.level

    def memory_allocated(self):
        return self.level

    def max_memory_allocated(self):
        return self.highest

"""What stands in for a CUDA device in tests on machines without one."""

from __future__ import annotations


class Allocator:
    """Stands in for torch.cuda: levels, and their highest since the last reset.

    ``spare``: bytes by which the blocks that it hands out are larger than what is asked for.
    """

    def __init__(self, spare=0):
        self.spare = spare
        self.now = dict.fromkeys(("allocated_bytes.all", "requested_bytes.all", "allocation.all"), 0)
        self.highest = dict(self.now)

    def allocate(self, size):
        """Allocate bytes; free them if ``size`` is negative."""
        sign = 1 if size > 0 else -1
        changes = size + sign * self.spare, size, sign
        for name, change in zip(self.now, changes, strict=True):
            self.now[name] += change
            self.highest[name] = max(self.highest[name], self.now[name])

    def reset_peak_memory_stats(self):
        self.highest = dict(self.now)

    def memory_stats(self):
        levels = {f"{name}.current": level for name, level in self.now.items()}
        return levels | {f"{name}.peak": level for name, level in self.highest.items()}

"""Improve a schedule under a limit: recomputations that are left out, for others that take less time."""

"""Moves to host memory in emitted graphs: the calls, where they are written, and what copies."""

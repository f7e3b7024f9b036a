"""Moves to host memory: where they start and end, what the link takes, and schedules made for them."""

"""Rematerialization plans for PyTorch training steps."""

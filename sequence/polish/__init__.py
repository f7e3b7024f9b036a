"""Recomputations of a schedule decided again, a part at a time, by a constraint solver."""

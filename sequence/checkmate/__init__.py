"""Checkmate over the whole joint graph: its program, solved by CP-SAT, and its linear relaxation, rounded."""

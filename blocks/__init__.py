"""One block: its problem, the CP-SAT model, the Pareto set of options, and the simulator that judges them.

No torch here: a block is integers, bytes and nanoseconds. OR-Tools loads at the first solve.
"""

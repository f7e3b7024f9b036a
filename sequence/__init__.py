"""The chain of blocks: a dynamic program over the options of its blocks, and its frontier.

:func:`frontier` is the way in: chain, bindings and option sets to a Pareto set of exact schedules. Its
stages stand alone: :func:`chain_problem`, :func:`chain_table`, :class:`Backtracker`, :class:`Flattener`.
"""

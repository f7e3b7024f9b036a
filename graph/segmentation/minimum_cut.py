"""Minimum cuts of directed networks, by OR-Tools: networkx's flows take half of a large segmentation."""

from __future__ import annotations

from collections.abc import Hashable

import networkx as nx


def source_side(network: nx.DiGraph[Hashable], source: Hashable, sink: Hashable) -> set[Hashable]:
    """The nodes on the source's side of a minimum cut; of all such cuts, the one with most nodes there.

    Edges without a ``capacity``, a whole number, cannot be cut; some cut has to be possible.
    """
    from ortools.graph.python.max_flow import SimpleMaxFlow  # kept plans need no solver

    number = {node: index for index, node in enumerate(network)}
    edges = list(network.edges(data="capacity"))
    uncut = 1 + sum(capacity for _, _, capacity in edges if capacity is not None)
    flow = SimpleMaxFlow()
    for tail, head, capacity in edges:
        flow.add_arc_with_capacity(number[tail], number[head], uncut if capacity is None else capacity)
    status = flow.solve(number[source], number[sink])
    if status != flow.OPTIMAL:
        raise ValueError(f"no maximum flow of {len(edges)} edges: {status.name}")
    # not flow.get_sink_side_min_cut(): it leaves out some nodes that reach the sink
    residual: nx.DiGraph[Hashable] = nx.DiGraph()  # where more could flow
    residual.add_node(sink)
    for arc, (tail, head, _) in enumerate(edges):
        if (through := flow.flow(arc)) < flow.capacity(arc):
            residual.add_edge(tail, head)
        if through > 0:
            residual.add_edge(head, tail)
    late: set[Hashable] = nx.ancestors(residual, sink)
    return set(network) - late - {sink}

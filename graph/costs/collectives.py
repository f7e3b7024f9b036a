"""What collectives take in PyTorch's own memory beside what they return."""

from __future__ import annotations

from torch import distributed, fx

from hybridremat.graph.tracing.fx_nodes import is_collective, tensors


def scatters_a_copy(device: str) -> bool:
    """Whether a reduce-scatter reduces a copy of its input everywhere: gloo has none of its own.

    Without a process group yet, that is taken to be so on the CPU.
    """
    if device != "cpu" or not distributed.is_available():
        return False
    return not distributed.is_initialized() or "cpu:gloo" in str(distributed.get_backend_config())


def collective_workspace(node: fx.Node) -> int:
    """Bytes that a node takes while it runs, if it is a collective."""
    if not is_collective(node) or "reduce_scatter" not in str(node.target):
        return 0
    given = [each for source in node.all_input_nodes for each in tensors(source.meta.get("val"))]
    return sum(each.nbytes for each in given if scatters_a_copy(each.device.type))

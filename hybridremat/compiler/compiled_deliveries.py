"""Gradients that leave in the backward of a compiled step: an op that Inductor leaves where it is.

It says that it writes to the gradient and to all that shares memory with the parameter, so whatever reads
them comes before it. The gradient's buffer is the caller's from then on: the generated code lets it go.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from hybridremat.compiler.early_gradients import deliver
from hybridremat.graph.private_inductor import let_buffer_go
from hybridremat.graph.private_torch import step_inputs
from hybridremat.graph.tracing.fx_nodes import storages
from hybridremat.graph.tracing.trace import TracedStep

_LIBRARY: Final = torch.library.Library("hybridremat", "FRAGMENT")
_LIBRARY.define("deliver(Tensor(a!) gradient, Tensor(b!)[] parameters, int index) -> ()")
_LIBRARY.impl("deliver", lambda gradient, _, index: deliver(gradient, index), "CompositeExplicitAutograd")
_LIBRARY.impl("deliver", lambda *_: None, "Meta")

DELIVER: Final = torch.ops.hybridremat.deliver.default
let_buffer_go(torch.ops.hybridremat.deliver)


def as_ops(step: TracedStep, backward: fx.GraphModule) -> None:
    """Make the deliveries of a backward graph, which has been checked, calls of the op."""
    inputs = step_inputs(step.module)
    given = backward.graph.find_nodes(op="placeholder")
    for node in backward.graph.find_nodes(op="call_function", target=deliver):
        gradient, index = node.args
        memory = storages(inputs[index])
        node.target = DELIVER
        node.args = (gradient, [each for each in given if not memory.isdisjoint(storages(each))], index)
        node.meta["val"] = None
    backward.recompile()

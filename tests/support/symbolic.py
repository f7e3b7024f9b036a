"""Steps that are captured with symbols for sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from hybridremat.compiler.backend import Backend, CaptureComplete
from hybridremat.compiler.capture import capture, compile_step, translated_errors
from hybridremat.compiler.dynamic_inputs import Dimensions, sample_with_symbols
from hybridremat.graph.tracing.symbolic import SymbolicJoint, symbolic_joint
from hybridremat.graph.tracing.trace import TracedStep, trace_joint
from hybridremat.planning.portfolio import Portfolio
from hybridremat.planning.symbolic_partition import SymbolicPartition


@dataclass
class Joint:
    """A partitioner that keeps the joint graph it is given, and how it is to be split; nothing runs."""

    module: fx.GraphModule | None = None
    num_outputs: int = 0
    how: Mapping[str, object] | None = None

    def split(self, joint, num_outputs, **how):
        self.module, self.num_outputs, self.how = joint, num_outputs, how
        raise CaptureComplete

    def traced(self) -> TracedStep:
        return trace_joint(self.module, self.num_outputs, **self.how)

    def symbolic(self) -> SymbolicJoint | None:
        return symbolic_joint(self.module, self.num_outputs)


def captured(model: nn.Module, batch: Mapping[str, torch.Tensor], symbols: Dimensions | None = None) -> Joint:
    """The joint graph of a step, with symbols for some dimensions of its inputs."""
    found = Joint()
    backend = Backend(found, dynamic=symbols is not None)
    if symbols is not None:
        _, batch = sample_with_symbols((), batch, symbols)
    capture(model, compile_step(model, backend), backend, (), batch).plan()
    return found


def traced_at(joint: Joint, symbolic: SymbolicJoint, *sizes: int) -> TracedStep:
    """The traced step of a symbolic joint graph at sizes, in the order of its inputs."""
    instance = symbolic.at(dict(zip(symbolic.inputs, sizes, strict=True)))
    return trace_joint(instance.module, joint.num_outputs, merged=True, **joint.how)


def shapes(step: TracedStep) -> list[tuple[object, ...]]:
    """What a traced step is, but for names: ops, what joins them, bytes, outputs."""
    graph = step.graph
    ops = [(o.target, o.phase, o.reads, o.writes, o.flops, o.io_bytes, o.random) for o in graph.ops]
    values = [(v.bytes, v.producer, v.shape, v.dtype, v.tangent) for v in graph.values]
    return [*ops, *values, (graph.held_outputs, graph.released_outputs, graph.gradients), graph.fingerprint]


@dataclass
class Dynamic:
    """A model whose steps are captured once, and run schedules that ``choose`` gives at each size."""

    model: nn.Module
    backend: Backend
    partition: SymbolicPartition
    compiled: Callable[..., object]

    def __call__(self, **batch):
        with translated_errors(self.model, self.backend):
            return self.compiled(**batch)

    def prepare(self, *sizes: int) -> None:
        """Plan for sizes before a step is measured: planning measures, too."""
        self.portfolio.number_for(dict(zip(self.portfolio.steps.joint.inputs, sizes, strict=True)))

    @property
    def portfolio(self) -> Portfolio:
        return self.partition.portfolio

    def __getattr__(self, name):  # parameters and buffers, for ``support.training.train``
        return getattr(self.model, name)


def dynamic(model, batch, symbols, choose, rewriting=None, **how) -> Dynamic:
    """Capture a step with symbols, and plan it at the sizes of the sample."""
    partition = SymbolicPartition(choose, rewriting)
    backend = Backend(partition, dynamic=True, **how)
    compiled = compile_step(model, backend)
    _, sample = sample_with_symbols((), batch, symbols)
    capture(model, compiled, backend, (), sample).plan()
    return Dynamic(model, backend, partition, compiled)

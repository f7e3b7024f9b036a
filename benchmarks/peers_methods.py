"""What people do today to train in less memory: each method prepares a model, or does not apply to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import peers_regions
import peers_sac_ilp
import torch
from stock_inductor import Compiler
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import select_decomp_table
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import hybridremat
from hybridremat.analysis.measure import loss_of
from hybridremat.graph.tracing.flops import node_flops
from hybridremat.plans.request import MOVING
from hybridremat.sequence.strategies import STRATEGIES

BUDGETS = ("1.0", "0.8", "0.6", "0.4", "0.2", "0.0")
"""Values of PyTorch's ``activation_memory_budget``."""

LAYERS = {
    "GPT2LMHeadModel": "GPT2Block",
    "BertForMaskedLM": "BertLayer",
    "LlamaForCausalLM": "LlamaDecoderLayer",
    "T5ForConditionalGeneration": "T5Block",
    "ViTForImageClassification": "ViTLayer",
    "ResNetForImageClassification": "ResNetStage",
    "UNet": "Sequential",
}
"""The layers or stages that people checkpoint, by the class of the model."""

PRODUCTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    )
)
"""What selective checkpointing saves: products, convolutions, attention."""

Batch = Mapping[str, Tensor]


class NotApplicableError(Exception):
    """A method that this model has no place for."""


@dataclass(frozen=True)
class Method:
    """One way to train; ``settings``: those it is tried with; ``prepare`` changes a model in place.

    It returns the compiler that will have counted the flops of what it was given; None if ops run one by one.
    """

    settings: tuple[str, ...]
    prepare: Callable[[nn.Module, Batch, str], Compiler | None]


class OpByOp(Compiler):
    """A backend of ``torch.compile`` that runs a partition's graphs as they are, and counts their flops."""

    def __init__(self, *, decomposed: bool) -> None:
        super().__init__()
        self.decomposed = decomposed

    def __call__(self, module: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        """As the backend ``aot_eager`` does, or ``aot_eager_decomp_partition``."""
        how = {"decompositions": select_decomp_table} if self.decomposed else {}
        return aot_autograd(
            fw_compiler=self.counted,
            bw_compiler=self.counted,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
            keep_inference_input_mutations=True,
            **how,
        )(module, inputs)

    def counted(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """The graph, run op by op."""
        self.flops += sum(node_flops(node) for node in graph.graph.nodes if node.op == "call_function")
        return boxed_nop(graph, inputs)


class EachRun(OpByOp):
    """Counts at each run, while it does: layers that are alike share a graph.

    ``replaced``: flops of a plain step of what it runs, which is a part of the model.
    """

    counts, replaced = True, 0

    def counted(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """The graph, run op by op."""
        flops = sum(node_flops(node) for node in graph.graph.nodes if node.op == "call_function")
        plain = boxed_nop(graph, inputs)

        def run(given: Any) -> Any:
            self.flops += flops if self.counts else 0
            return plain(given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers or stages that are checkpointed; NotApplicableError if none are known."""
    name = LAYERS.get(type(model).__name__)
    found = [module for module in model.modules() if type(module).__name__ == name]
    if not found:
        raise NotApplicableError(f"no layers of {type(model).__name__} are known")
    return found


def _eager(*_: Any) -> None:
    """Nothing."""


def _aot_eager(model: nn.Module, __: Batch, ___: str) -> Compiler:
    compiler = OpByOp(decomposed=False)
    model.compile(backend=compiler)
    return compiler


def _switch(model: nn.Module, __: Batch, ___: str) -> None:
    """Hugging Face's own switch."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise NotApplicableError(f"{type(model).__name__} has no switch for checkpointing")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _by_layer(model: nn.Module, _: Batch, setting: str) -> None:
    """``checkpoint`` around every layer or stage, or every second."""
    for layer in layers_of(model)[:: 2 if setting == "every second" else 1]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]


class _Segments(nn.Module):
    """Layers in segments, in place of a list of layers that takes and returns hidden states."""

    def __init__(self, layers: nn.ModuleList, segments: int) -> None:
        super().__init__()
        self.in_segments, self.segments = layers, segments

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The hidden states behind the last layer."""

        def run(layer: nn.Module, given: Tensor) -> Tensor:
            found = layer(given, *args, **kwargs)
            return found if isinstance(found, Tensor) else found[0]

        functions = [partial(run, layer) for layer in self.in_segments]
        found: Tensor = checkpoint_sequential(functions, self.segments, hidden, use_reentrant=False)
        return found


def _sequential(model: nn.Module, _: Batch, setting: str) -> None:
    """``checkpoint_sequential`` over the one list of layers that a model has."""
    layers = layers_of(model)
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and list(child) == layers
    ]
    if len(lists) != 1 or type(model).__name__ == "ResNetForImageClassification":
        raise NotApplicableError(f"{type(model).__name__} is no sequence of layers")
    ((parent, name, child),) = lists
    setattr(parent, name, nn.ModuleList([_Segments(child, int(setting))]))


def _selective(model: nn.Module, _: Batch, setting: str) -> None:
    """Selective checkpointing of every layer that saves its products, or every second one."""
    step = 2 if setting == "every second product" else 1

    def contexts() -> Any:
        numbers: Iterator[int] = count()

        def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
            saved = op in PRODUCTS and next(numbers) % step == 0
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for layer in layers_of(model):
        layer.forward = partial(  # type: ignore[method-assign]
            checkpoint, layer.forward, use_reentrant=False, context_fn=contexts
        )


def _partition(model: nn.Module, _: Batch, setting: str) -> Compiler:
    """PyTorch's min-cut partition of decomposed ops, run op by op."""
    functorch_config.activation_memory_budget = float(setting)
    compiler = OpByOp(decomposed=True)
    model.compile(backend=compiler)
    return compiler


def _regions(model: nn.Module, batch: Batch, setting: str) -> Compiler:
    """Each layer compiled by itself, as :func:`_partition` does the model."""
    steps = {}
    for each, how in ((copy.deepcopy(model), peers_regions.PLAIN), (model, setting)):
        steps[how] = EachRun(decomposed=True)
        peers_regions.compile_each(layers_of(each), how, steps[how])
        for _ in range(2):  # the first compiles
            steps[how].flops = 0
            loss_of(each(**batch)).backward()
        steps[how].counts = False
        each.zero_grad()
    compiler = steps[setting]
    compiler.replaced = steps[peers_regions.PLAIN].flops
    return compiler


def _sac_ilp(model: nn.Module, batch: Batch, setting: str) -> None:
    """PyTorch's integer program for selective checkpointing."""
    try:
        peers_sac_ilp.prepare(model, batch, setting)
    except peers_sac_ilp.SacIlpError as error:
        raise NotApplicableError(str(error)) from error


def _inductor(model: nn.Module, _: Batch, setting: str) -> Compiler:
    functorch_config.activation_memory_budget = float(setting)
    functorch_config.enable_autograd_cache = False  # a kept graph would not be handed to us
    compiler = Compiler()
    model.compile(backend=compiler)
    return compiler


def _ours(strategy: str, model: nn.Module, batch: Batch, setting: str) -> None:
    how: dict[str, Any] = {"kwargs": dict(batch), "cost_model": "flops", "workers": 1, "progress": False}
    hybridremat.wrap(model, memory_limit=int(setting), strategy=strategy, **how)


def _compiled(model: nn.Module, batch: Batch, setting: str) -> None:
    how: dict[str, Any] = {"kwargs": dict(batch), "cost_model": "flops", "workers": 1, "progress": False}
    hybridremat.wrap(model, memory_limit=int(setting), compiler="inductor", on_infeasible="least", **how)


METHODS: dict[str, Method] = {
    "eager": Method(("",), _eager),
    "aot_eager": Method(("",), _aot_eager),
    "switch": Method(("",), _switch),
    "checkpoint": Method(("every", "every second"), _by_layer),
    "checkpoint_sequential": Method(("2", "3"), _sequential),
    "selective": Method(("every product", "every second product"), _selective),
    "partition": Method(BUDGETS, _partition),
    "inductor": Method(BUDGETS, _inductor),
    "regions": Method(peers_regions.SETTINGS, _regions),
    "sac_ilp": Method(peers_sac_ilp.SETTINGS, _sac_ilp),
}
"""By name; those of others."""

OURS: dict[str, Method] = {
    **{name: Method((), partial(_ours, name)) for name in STRATEGIES if name not in MOVING},
    "hybrid, compiled": Method((), _compiled),
}
"""Ours, and published strategies in our hands; the setting is the limit in bytes."""

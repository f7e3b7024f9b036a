"""What one rank really holds of a model that is sharded or split: an oracle of ``fit``."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import hybridremat
from hybridremat.zoo.models import reference_model

HOW = {"cost_model": "flops", "workers": 1, "progress": False, "cache": False}


class Stack(nn.Module):
    """A small language model without attention, of sizes that no number of ranks shares evenly."""

    def __init__(self, *, asks: bool = False) -> None:
        super().__init__()
        self.asks = asks
        self.embed = nn.Embedding(101, 35)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(35, 99), nn.GELU(), nn.Linear(99, 35), nn.LayerNorm(35)) for _ in range(3)
        )
        self.register_buffer("scale", torch.ones(35))
        self.head = nn.Linear(35, 101)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x * self.scale.type_as(x)
        for layer in self.layers:
            x = torch.tanh(x + layer(x))
            if self.asks and x.sum().item() > 1e9:
                x = x.sin()
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def stack(**how: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and a batch for it."""
    torch.manual_seed(0)
    return Stack(**how), {"tokens": torch.randint(101, (8, 32))}


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """One that brings a tensor parallel plan."""
    return reference_model("llama", changes={"num_hidden_layers": 1, "length": 32})


def bytes_of(tensors: Any) -> int:
    """Of the storages of some tensors, on this rank, each once."""
    local = [getattr(each.detach(), "_local_tensor", each.detach()) for each in tensors]
    storages = [each.untyped_storage() for each in local]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


class Sent(TorchDispatchMode):
    """Adds up the whole buffers of collectives: those that are gathered, and those that are reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = str(func)
            self.bytes += args[0].nbytes if "allgather_base" in name else 0
            self.bytes += args[1].nbytes if "reduce_scatter_base" in name else 0
        return func(*args, **(kwargs or {}))


def trained(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that are there after a step, and what collectives moved in it."""
    optimizer = torch.optim.AdamW(model.parameters())
    with Sent() as sent:
        model(**batch).backward()
    optimizer.step()
    state = [each for every in optimizer.state.values() for each in every.values()]
    return {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(each.grad for each in model.parameters()),
        "optimizer_state": bytes_of(state),
        "moved": sent.bytes,
    }


def sharded(_: int) -> dict[str, int]:
    """What FSDP2 leaves on the first of some ranks."""
    model, batch = stack()
    for layer in model.layers:
        fully_shard(layer)
    return trained(fully_shard(model), batch)


def split(_: int) -> dict[str, int]:
    """What tensor parallel leaves on the first of some ranks, and the plan of its step."""
    model, batch = llama()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    layer = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    plan: dict[str, Any] = {f"model.layers.0.{name}": style for name, style in layer.items()}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    frontier = hybridremat.frontier(model, kwargs=batch, **HOW)
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    for each in parameters:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    return {
        "parameters": bytes_of(parameters),
        "optimizer_state": bytes_of(t for every in optimizer.state.values() for t in every.values()),
        "plain_step": frontier.plain_peak,
        "least_step": frontier.least.peak,
    }

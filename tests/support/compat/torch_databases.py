"""PyTorch's own databases of modules and ops: tiny nets around each entry, held to plain training.

They are what PyTorch tests itself with: of each entry the arguments that it has to work on.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any, Final

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import hybridremat
from support.compat.harness import EQUAL, EQUAL_TO_JOINT, HOW, _Through
from support.training import allocated_peak

DTYPES: Final = torch.float32, torch.int64, torch.bool, torch.complex64
MOST: Final = 4
"""Nets of one entry, spread over its arguments."""
LOOKED_AT: Final = 200
"""Arguments of one entry: some have thousands."""
NOT_BY_EAGER: Final = "not trained by plain PyTorch here"
"""What is said of an entry none of whose arguments train in plain PyTorch on a CPU."""
NOT_CAPTURED: Final = 'refused, as by `torch.compile(backend="aot_eager")`'
UNSET: Final = frozenset(
    f"op {name}"
    for name in (
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        *("resize_", "resize_as_", "resize_ in place", "resize_as_ in place"),
    )
)
"""Their numbers are those that happen to be in memory."""


class Around(nn.Module):
    """Calls what is given on scaled inputs, and makes a loss of all that it returns."""

    def __init__(self, call: Callable[..., Any], args: Any, kwargs: Any, *, changed: bool = False) -> None:
        super().__init__()
        leaves, self.spec = tree_flatten((args, kwargs))
        self.call, self.changed = call, changed
        self.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.batch: dict[str, torch.Tensor] = {}
        self.gain = nn.Parameter(torch.tensor(0.5))
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self.batch[f"t{number}"] = leaf.detach()
                if leaf.requires_grad and leaf.layout == torch.strided:
                    self.register_parameter(f"scale_t{number}", nn.Parameter(torch.ones(leaf.shape)))

    def forward(self, **batch):
        """The loss, and what was returned."""
        leaves = list(self.others)
        for name, tensor in batch.items():
            scale = self._parameters.get(f"scale_{name}")
            leaves[int(name[1:])] = tensor if scale is None else tensor * scale
        if self.changed and self._parameters.get("scale_t0") is None:
            leaves[0] = leaves[0].clone()
        args, kwargs = tree_unflatten(leaves, self.spec)
        output = self.call(*args, **kwargs)
        loss = self.gain * 1.0
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor):
                dense = each.to_dense() if each.layout != torch.strided else each
                real = dense.abs() if dense.is_complex() else dense.to(torch.float32)
                loss = loss + (real * self.gain).square().sum()
            else:
                loss = loss + each
        return loss, output


@dataclass(frozen=True)
class Entry:
    """An entry of a database: its name, and the nets around it on each of its own arguments."""

    name: str
    nets: Callable[[], Iterator[Around]]


def _around_op(info: Any, call: Callable[..., Any], *, changed: bool = False) -> Iterator[Around]:
    known = info.supported_dtypes("cpu")
    dtype = next(each for each in DTYPES if each in known)
    learns = info.supports_autograd and dtype in (torch.float32, torch.complex64)
    for sample in info.sample_inputs("cpu", dtype, requires_grad=learns):
        yield Around(call, (sample.input, *sample.args), sample.kwargs, changed=changed)


def _around_module(info: Any) -> Iterator[Around]:
    made = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    )
    for each in made:
        own, given = each.constructor_input, each.forward_input
        module = info.module_cls(*own.args, **own.kwargs).train()
        yield Around(module, given.args, given.kwargs)


@cache
def entries() -> tuple[Entry, ...]:
    """All that can run on a CPU, and those ops that change their input once more in that form."""
    ops = [info for info in op_db if set(DTYPES) & info.supported_dtypes("cpu")]
    changing = [info for info in ops if info.inplace_variant is not None]
    found = [Entry(f"op {info.formatted_name}", partial(_around_op, info, info.op)) for info in ops]
    found += [
        Entry(
            f"op {info.formatted_name} in place",
            partial(_around_op, info, info.inplace_variant, changed=True),
        )
        for info in changing
    ]
    modules = (info for info in module_db if not info.is_lazy)
    found += [Entry(f"module {info.formatted_name}", partial(_around_module, info)) for info in modules]
    return tuple(each for each in found if each.name not in UNSET)


def _trained(model: Any, net: Around) -> tuple[list[torch.Tensor], list[int]]:
    """All numbers of two steps, and the peak of each."""
    numbers: list[torch.Tensor] = []
    peaks: list[int] = []
    torch.manual_seed(1)
    for _ in range(2):
        model.zero_grad()
        made: list[Any] = []

        def run(made: list[Any] = made) -> None:
            loss, output = model(**net.batch)
            loss.backward()
            made += [loss, output]

        peaks.append(allocated_peak(run))
        gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        buffers = [buffer for _, buffer in model.named_buffers()]
        everything = [*tree_leaves(made), *(grad for _, grad in gradients), *buffers, torch.get_rng_state()]
        numbers += [torch.as_tensor(each).detach().clone() for each in everything]
    return numbers, peaks


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether all are the same numbers; what is not a number is the same as itself."""

    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
            return False
        a, b = (each if each.layout == torch.strided else each.to_dense() for each in (a, b))
        return bool(((a == b) | ((a != a) & (b != b))).all())

    return len(one) == len(other) and all(map(equal, one, other))


def _outcome(net: Around, expected: Sequence[torch.Tensor]) -> str:
    """Train a net at its least limit; as what that comes out equal."""
    how = {**HOW, "hold_outputs": True, "memory_limit": 1, "on_infeasible": "least"}
    try:
        planned = hybridremat.wrap(copy.deepcopy(net), kwargs=net.batch, **how)
    except hybridremat.HybridRematError:
        try:
            _trained(_Through(copy.deepcopy(net)), net)
        except Exception:  # noqa: BLE001 - whatever PyTorch's capture raises
            return NOT_CAPTURED
        raise
    limit = hybridremat.get_plan(planned).memory_limit
    got, peaks = _trained(planned, net)
    outcome = EQUAL if same(expected, got) else EQUAL_TO_JOINT
    if outcome == EQUAL_TO_JOINT:
        joint, _ = _trained(_Through(copy.deepcopy(net)), net)
        assert same(joint, got), "the numbers are neither plain eager's nor the joint graph's"
    assert max(peaks) <= limit, f"{max(peaks)} bytes pass {limit}"
    return outcome


def hold_to_plain(entry: Entry) -> str:
    """Hold some nets of an entry to plain training; the weakest outcome."""
    torch.manual_seed(0)
    nets = list(islice(entry.nets(), LOOKED_AT))
    outcomes: Counter[str] = Counter()
    for net in nets[:: max(1, len(nets) // MOST)][:MOST]:
        try:
            expected, _ = _trained(copy.deepcopy(net), net)
        except Exception:  # noqa: BLE001 - arguments that are there to be refused, or have no gradient
            continue
        outcomes[_outcome(net, expected)] += 1
    return next((each for each in (NOT_CAPTURED, EQUAL_TO_JOINT, EQUAL) if outcomes[each]), NOT_BY_EAGER)

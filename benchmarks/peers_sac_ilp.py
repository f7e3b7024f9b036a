"""PyTorch's own integer program for selective checkpointing, ``torch.distributed._tools.sac_ilp``, as a peer.

It needs ``pip install pulp pwlf`` (of the benchmark alone, no dependency of the package). A step under fake
tensors tells memory, time and trade-offs of each module; the program says which modules are checkpointed and
what share of their values each discards; a second one, for each of these, which ops it saves. The decision is
carried out with ``torch.utils.checkpoint`` and a policy by op.

Its estimates of time ask for a CUDA device. ``as it is`` shows what becomes of that here; in the other
settings times are a roofline's for one core (:data:`FLOPS`, :data:`BANDWIDTH`), and all else is PyTorch's.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from hybridremat.analysis.measure import loss_of

AS_IT_IS: Final = "as it is"
LEAST: Final = "least"
SETTINGS: Final = (AS_IT_IS, "0.6", LEAST)
"""Shares of the bytes beyond parameters that its own model of a plain step has at its peak; ``least``: the
least share, in hundredths, for which the program has a solution."""

FLOPS, BANDWIDTH, LAUNCH = 5e10, 1e10, 1e-6
"""Of one core, in flops and bytes a second, and seconds that a call takes: what is dear to make again, in
proportion. Calls that take nothing are not in the program, which then reads their values in vain."""

Batch = Mapping[str, Tensor]


class SacIlpError(Exception):
    """The program, or what feeds it, has no answer."""


def roofline(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """What an op returns, and milliseconds: PyTorch's contract for estimates, without a device's figures."""
    given = kwargs or {}
    made = func(*args, **given)
    flops = flop_registry.get(func.overloadpacket)
    work = flops(*args, **given, out_val=made) if flops is not None else 0
    leaves = torch.utils._pytree.tree_leaves((args, given, made))
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    moved = 0 if func.is_view else sum(each.numel() * each.element_size() for each in tensors)
    return made, 1000 * (LAUNCH + max(work / FLOPS, moved / BANDWIDTH))


def as_fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the model with fake parameters and buffers, shared ones shared."""
    made: dict[int, Tensor] = {}
    fake = copy.deepcopy(model)
    for module in fake.modules():
        for held in (module._parameters, module._buffers):
            for name, each in held.items():
                if each is None:
                    continue
                if id(each) not in made:
                    own = mode.from_tensor(each.detach())
                    is_parameter = held is module._parameters
                    made[id(each)] = nn.Parameter(own, each.requires_grad) if is_parameter else own
                held[name] = made[id(each)]  # type: ignore[assignment]
    return fake


def module_figures(model: nn.Module, batch: Batch, *, as_it_is: bool) -> tuple[Any, Any]:
    """PyTorch's graph of modules, with their figures, and its estimator, which knows the ops of each."""
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    kind = "operator-level-cost-model"
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = as_fake(model, mode)
    given = {name: mode.from_tensor(each) for name, each in batch.items()}
    alive: list[nn.Module] = []  # a loss made in a forward, too: the trackers want it in the backward
    keep = nn.modules.module.register_module_forward_pre_hook(lambda module, _: alive.append(module))
    with mode:
        memory, times, choices = MemTracker(), RuntimeEstimator()(kind), SACEstimator()(kind)
        if not as_it_is:
            times._estimate = choices._estimate_runtime = roofline
        memory.track_external(fake)
        with memory:
            for step in range(2):  # the first makes gradients that the second adds to
                loss_of(fake(**given)).backward()
                if step == 0:
                    fake.zero_grad(set_to_none=True)
                    memory.reset_mod_stats()
        with times:
            loss_of(fake(**given)).backward()
        with choices:
            fake(**given)
        keep.remove()
        device = next(fake.parameters()).device
        leave_out(fake, memory, times, choices)
        return parse_module_info(aggregate_stats(fake, memory, times, choices, device)), choices


def leave_out(model: nn.Module, memory: Any, times: Any, choices: Any) -> None:
    """Forget modules that PyTorch's collection stumbles over.

    Those that have no backward (rotary embeddings, say), those that a forward makes (losses), and of those
    whose last op alone makes something the ops: it divides by what the others make.
    """
    from torch.distributed._tools.mem_tracker import _ModState

    own = set(model.modules())
    for module, figures in list(memory.memory_tracking.items()):
        if module not in own or not {_ModState.PRE_BW, _ModState.PEAK_BW} <= figures.snapshots.keys():
            del memory.memory_tracking[module]
    for path, ops in list(choices.sac_mod_stats.items()):
        if not sum(ops.memory) or not sum(ops.runtimes):
            del choices.sac_mod_stats[path]
    known = {figures.mod_fqn for figures in memory.memory_tracking.values()}
    for order in (times.mod_fw_pre_order, times.mod_fw_post_order):
        order[:] = dict.fromkeys(path for path in order if path in known)  # once, where one runs twice


def solved(graph: Any, share: float) -> tuple[dict[str, float], int] | None:
    """Modules to checkpoint with the share each discards, and the peak that the program promises, in bytes.

    ``share``: of what it counts beyond parameters at the plain step's peak. None if there is no solution.
    """
    from torch.distributed._tools.ilp_utils import get_peak_memory_runtime_baseline
    from torch.distributed._tools.sac_ilp import sac_milp

    plain, _ = get_peak_memory_runtime_baseline(graph)
    parameters = graph.nodes[0]["param_per_module"]
    budget = parameters + share * (plain - parameters)
    found, _, peak = sac_milp(graph, memory_budget=budget / 2**30)
    return (found, peak - parameters) if peak >= 0 else None


def decided(graph: Any, setting: str) -> dict[str, float]:
    """Modules to checkpoint for a setting, each with the share that it discards."""
    if setting != LEAST:
        found = solved(graph, float(setting))
        if found is None:
            raise SacIlpError(f"its program has no solution at {setting} of what it counts")
        return found[0]
    low, high = 0, 100  # hundredths: without a solution, with one
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if solved(graph, middle / 100) is None else (low, middle)
    found = solved(graph, high / 100)
    assert found is not None
    return found[0]


def carry_out(module: nn.Module, saved: Sequence[int], names: Sequence[str]) -> None:
    """Checkpoint a module; ``saved``: of its ops in order, whether each is saved; ``names``: of these ops.

    Ops are told by name and number among those of the name: under fake tensors Transformers makes masks that
    it leaves out of a real step, so that places differ.
    """
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    kept = {op for op, is_saved in zip(numbered(names), saved, strict=True) if is_saved}

    def contexts() -> Any:
        seen: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

        def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if op in OPS_TO_ALWAYS_SKIP:
                return CheckpointPolicy.PREFER_RECOMPUTE
            name = op.overloadpacket.__name__
            number = seen[context.is_recompute][name]
            seen[context.is_recompute][name] += 1
            return CheckpointPolicy.MUST_SAVE if (name, number) in kept else CheckpointPolicy.PREFER_RECOMPUTE

        # what is saved with what writes over it: the program takes both or none
        return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)

    module.forward = partial(  # type: ignore[method-assign]
        checkpoint, module.forward, use_reentrant=False, context_fn=contexts
    )


def numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Each name with how often it came before."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        found.append((name, seen[name]))
        seen[name] += 1
    return found


def ops_saved(ops: Any, discarded: float) -> list[int]:
    """For each op of a module whether it is saved, by PyTorch's second program.

    Where that has no solution with so much discarded (ops in place are saved, whatever it is told), for the
    next hundredth less for which it has one.
    """
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module

    for hundredths in range(101):
        kept = min(1.0, 1 - discarded + hundredths / 100)
        if saved := get_optimal_checkpointing_policy_per_module(ops, kept):
            return saved
    raise SacIlpError("its program of ops has no solution")


def prepare(model: nn.Module, batch: Batch, setting: str) -> None:
    """Checkpoint what the programs choose for a setting of :data:`SETTINGS`."""
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        graph, choices = module_figures(model, batch, as_it_is=setting == AS_IT_IS)
    for path, discarded in decided(graph, setting).items():
        ops = choices.sac_mod_stats[path]
        module = model.get_submodule(path.partition(".")[2])
        carry_out(module, ops_saved(ops, discarded), ops.func_names)

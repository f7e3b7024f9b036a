"""Unusual tensors, held to plain training: outputs, inputs after the call, gradients, buffers, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_structure

import hybridremat
from hybridremat import CaptureError
from support.compat.harness import EQUAL, EQUAL_TO_JOINT, HOW, _Through
from support.compat.tensor_cases import GROUPS, REFUSED
from support.compat.tensor_nets import Net, Unusual
from support.extreme_steps import run_extremely
from support.quick_planning import quick_planning
from support.training import Trained, allocated_peak

CASES = [case for cases in GROUPS.values() for case in cases]
REFERENCE = {"eager": EQUAL, "joint": EQUAL_TO_JOINT}
IN_SEVERAL = "in several graphs bit-equal to plain eager; as one a CaptureError"


def default_loss(output: Any) -> torch.Tensor:
    """Everything that carries a gradient takes part, unless there is a scalar: then it is the loss."""
    carrying = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    scalars = [t for t in carrying if t.dim() == 0]
    return scalars[0] if scalars else sum(t.abs().pow(2).mean() for t in carrying)


def described(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The numbers, and how they lie in memory."""
    layout = [*tensor.shape, *tensor.stride(), tensor.storage_offset()] if not tensor.is_sparse else []
    values = tensor.detach().resolve_conj().clone()
    return {"": values.coalesce().to_dense() if tensor.is_sparse else values, " layout": torch.tensor(layout)}


def measured(run: Callable[[], None], case: Unusual) -> list[int]:
    """The peak of a step, except where it may be planned as it runs, which takes the profiler itself."""
    if case.in_several:
        run()
        return []
    return [allocated_peak(run)]


def learn(model: torch.nn.Module, case: Unusual, steps: int = 3) -> tuple[Trained, list[Any]]:
    """Train, with a batch made anew for each step; keep everything, and the structure of the outputs."""
    result, kept = Trained({}), []

    def keep(name: str, tensor: torch.Tensor) -> None:
        result.tensors.update({name + part: item for part, item in described(tensor).items()})

    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) if case.learns else None
    for step in range(steps):
        model.zero_grad()
        batch = case.batch()

        def run(step=step, batch=batch):
            output = model(**batch)
            default_loss(output).backward()
            kept.append(output)

        result.peaks += measured(run, case)
        output = kept.pop()
        leaves = tree_leaves(output)
        kept.append((tree_structure(output), [x for x in leaves if not isinstance(x, torch.Tensor)]))
        for index, leaf in enumerate(x for x in leaves if isinstance(x, torch.Tensor)):
            keep(f"output {step} {index}", leaf)
        for index, leaf in enumerate(x for x in tree_leaves(batch) if isinstance(x, torch.Tensor)):
            keep(f"input {step} {index}", leaf)
            if leaf.is_leaf and leaf.grad is not None:
                keep(f"input gradient {step} {index}", leaf.grad)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                keep(f"gradient {step} {name}", parameter.grad)
        if optimizer is not None:
            optimizer.step()
        for name, buffer in model.named_buffers():
            keep(f"buffer {step} {name}", buffer)
    for name, parameter in model.named_parameters():
        keep(f"parameter {name}", parameter)
    keep("generator", torch.get_rng_state())
    return result, kept


def fresh(case: Unusual) -> Net:
    torch.manual_seed(0)
    model = Net(case.ends, **case.own())
    case.change(model)
    return model.train()


def loss_bytes(case: Unusual) -> int:
    """What the loss outside the model takes. Inputs with a history of their own serve for one backward."""
    batch = {
        name: value.detach() if isinstance(value, torch.Tensor) and value.grad_fn is not None else value
        for name, value in case.batch().items()
    }
    return hybridremat.measure(fresh(case), kwargs=batch, loss_fn=default_loss, repeats=1).outside


QUICK = {
    "views of one activation beside the loss",
    "activations changed in place",
    "a counter and a buffer put in another's place",
    "sparse gradients of an embedding",
}


def tier(case: Unusual):
    """No mark: `make test`; others of everyday: `make test-slow`; the rest: `make compat`."""
    everyday = () if case.name in QUICK else pytest.mark.slow
    return everyday if case.everyday else pytest.mark.compat


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=tier(c)) for c in CASES])
def test_unusual_tensors(case, line):
    reference = fresh(case) if case.reference == "eager" else _Through(fresh(case))
    expected, structure = learn(reference, case)
    torch.manual_seed(1)
    outside = loss_bytes(case)
    how = {**HOW, "hold_outputs": True, "reserve": outside, **case.how}
    with quick_planning():
        first = hybridremat.plan(fresh(case), kwargs=case.batch(), memory_limit="100000%", **how)
        limits = {"easy": max(first.plain_peak, first.least_peak), "least": first.least_peak}
        for name, limit in limits.items():
            planned = hybridremat.wrap(fresh(case), kwargs=case.batch(), memory_limit=limit, **how)
            trained, outputs = learn(planned, case)
            assert expected.differences(trained) == [], name
            assert outputs == structure
            assert max(trained.peaks) <= limit, (name, trained.peaks, limit)
    line("Tensors", case.name, REFERENCE[case.reference], remark=case.remark)


IN_PLACE = [
    pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in GROUPS["in place"]
]


@pytest.mark.parametrize("case", IN_PLACE)
def test_what_is_changed_in_place_when_all_is_computed_again(case):
    expected, structure = learn(fresh(case), case, steps=2)
    torch.manual_seed(1)
    extreme, _ = run_extremely(fresh(case), case.batch(), seed=0, share=1.0)
    trained, outputs = learn(extreme, case, steps=2)
    assert expected.differences(trained) == []
    assert outputs == structure


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in REFUSED])
def test_refused_tensors(case):
    model, plain, batch = fresh(case), fresh(case), case.batch()
    with pytest.raises(CaptureError, match=case.refused):
        hybridremat.wrap(model, kwargs=batch, memory_limit="50%", graph_breaks="error", **HOW)
    torch.manual_seed(1)
    got = default_loss(model(**batch))
    torch.manual_seed(1)
    assert torch.equal(got, default_loss(plain(**batch)))


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in REFUSED])
def test_what_is_refused_as_one_graph_by_default(case, line):
    model, how = fresh(case), {"kwargs": case.batch(), "memory_limit": "100%", **HOW}
    if not case.in_several:
        with pytest.raises(CaptureError):
            hybridremat.wrap(model, **how)
        line("Tensors", case.name, "CaptureError before anything has run", remark=case.remark)
        return
    with pytest.warns(hybridremat.GraphBreakWarning):
        hybridremat.wrap(model, **how)
    trained, outputs = learn(model, case)
    expected, structure = learn(fresh(case), case)
    assert expected.differences(trained) == []
    assert outputs == structure
    line("Tensors", case.name, IN_SEVERAL, remark=case.remark)

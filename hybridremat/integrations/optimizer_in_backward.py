"""Optimizers that step in the backward: each parameter once its gradient is final, which is then dropped.

The recipe of PyTorch's tutorials and of torchtune, around one ordinary optimizer: its ``state_dict``,
``param_groups`` and learning-rate schedulers stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridremat.errors import EarlyGradientError
from hybridremat.graph.costs.allocations import peaks_of
from hybridremat.graph.garbage import without_collection
from hybridremat.graph.private_torch import hooks_before_and_after
from hybridremat.runtime.planned_call import planned_call

logger = logging.getLogger(__name__)

Factory = Callable[[list[nn.Parameter]], Optimizer]

TRIAL_ROWS = (64, 192)  # of 256 numbers: the parameters that an optimizer's workspace is measured with
GUESSED = 2  # of a parameter's size: Adam's temporaries, for optimizers that cannot be tried


def optimizer_in_backward(model: nn.Module, factory: Factory) -> Optimizer:
    """An optimizer that steps each parameter of a model in the backward, and drops its gradient.

    Wrapped with ``gradients="in_backward"``, a step then never holds all gradients at once.

    Parameters
    ----------
    model
        Plain or wrapped. Call this before :func:`hybridremat.wrap` plans a step, so that what the optimizer
        allocates while it steps, which is measured once here, is counted.
    factory
        Makes an ordinary optimizer of a list of parameters, or of groups of them:
        ``lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)``. It is called with all trained
        parameters, and a few times with small ones to measure it.

    Returns
    -------
    torch.optim.Optimizer
        What the factory made, which now steps in the backward: ``state_dict``, ``load_state_dict``,
        ``param_groups`` and schedulers are the ordinary ones. ``step()`` and ``zero_grad()`` may be called
        where a loop calls them, and have nothing left to do. ``detach()`` makes it an ordinary one again.

    Raises
    ------
    EarlyGradientError
        If the factory returns no optimizer, or one that cannot step parameter by parameter; if a parameter
        has such an optimizer already. Later, if gradients are accumulated over several backwards, or scaled
        by a GradScaler.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise EarlyGradientError("no parameter of this model requires a gradient")
    _require_no_plan(model)
    optimizer = factory(list(parameters))
    if not isinstance(optimizer, Optimizer):
        raise EarlyGradientError(
            f"the factory returned a {type(optimizer).__name__}; it has to return a torch.optim.Optimizer "
            "of the parameters that it is given"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise EarlyGradientError("LBFGS runs several backwards for each step; it cannot step in one of them")
    taken = _parameters(optimizer)
    if not set(taken) <= set(parameters):
        raise _other_parameters()
    if any(isinstance(hook, _StepInBackward) for p in taken for hook in hooks_before_and_after(p)[1]):
        raise EarlyGradientError(
            "a parameter of this model has an optimizer in the backward already; call its detach() first"
        )
    workspace = _measured_workspace(factory, taken[0])
    optimizer.__class__ = _stepping_in_backward(type(optimizer))
    hook = _StepInBackward(optimizer, workspace)
    optimizer._in_backward = (hook, [])  # type: ignore[attr-defined]
    _register(optimizer, taken)
    return optimizer


def _register(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    hook, handles = optimizer._in_backward
    handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _other_parameters() -> EarlyGradientError:
    return EarlyGradientError(
        "the factory has to make the optimizer of the list of parameters that it is given, as it is also "
        "called with small ones to be measured; this one takes others. Make groups of that list, by a "
        "dictionary from parameters to names if they go by name"
    )


def _require_no_plan(model: nn.Module) -> None:
    """Refuse a model that is planned already: its plan would not count what the optimizer allocates."""
    for module in model.modules():
        call = planned_call(module)
        if call is not None and call.plan is not None and call.context.settings.gradients == "in_backward":
            raise EarlyGradientError(
                "this model is planned already, without what the optimizer allocates as it steps. Nothing "
                "has changed. Call hybridremat.unwrap, then optimizer_in_backward, then wrap."
            )


def require_steps_in_backward(optimizer: object, *, clips: bool, accumulates: bool, scales: bool) -> None:
    """Refuse a training loop that needs all gradients, if its optimizer steps in the backward.

    Parameters
    ----------
    optimizer
        The loop's, or what wraps it (``.optimizer``).
    clips, accumulates, scales
        What the loop does with gradients: clip them by their norm, add up those of several backwards, scale
        the loss.

    Raises
    ------
    EarlyGradientError
        Naming the first of them.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, _InBackward):
        return
    for asked, what, instead in (
        (clips, "clips gradients by their global norm", "max_grad_norm=0 or gradient_clip_val=None"),
        (accumulates, "accumulates gradients over several batches", "one batch a step"),
        (scales, "scales the loss (float16)", "bfloat16"),
    ):
        if asked:
            raise EarlyGradientError(
                f"the loop {what}, and its optimizer steps in the backward, where gradients are used and "
                f"dropped one by one. Train with {instead}, or with an ordinary optimizer. No step has run."
            )


@dataclass(frozen=True)
class Workspace:
    """Bytes that an optimizer allocates as it steps a parameter: so many for each of its bytes, and some."""

    each: int
    more: int

    def of(self, parameter: Tensor) -> int:
        """Bytes for one parameter."""
        return self.each * parameter.numel() * parameter.element_size() + self.more


class _StepInBackward:
    """The hook on every parameter."""

    def __init__(self, optimizer: Optimizer, workspace: Workspace) -> None:
        self._optimizer, self.workspace = optimizer, workspace.of
        self._groups: list[dict[str, Any]] = []
        self._group_of: dict[Tensor, dict[str, Any]] = {}
        self._stepped: set[Tensor] = set()
        self._accumulated = False
        self._loop_steps = False

    def __call__(self, parameter: Tensor) -> None:
        """Step one parameter and drop its gradient."""
        if parameter in self._stepped:
            self._accumulated = True
            if self._loop_steps:
                parameter.grad = None
                raise _accumulation("Nothing of this backward has been applied.")
        self._stepped.add(parameter)
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = [{**self._group(parameter), "params": [parameter]}]
        try:
            super(_InBackward, optimizer).step()  # type: ignore[misc]
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    def ended(self) -> None:
        """The loop has called ``step``: a new backward may begin."""
        self._stepped.clear()
        self._loop_steps = True
        if self._accumulated:
            self._accumulated = False
            raise _accumulation("Each of the backwards before this step() has been applied on its own.")

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        if groups is not self._groups or parameter not in self._group_of:  # loaded, or added
            self._groups = groups
            self._group_of = {p: group for group in groups for p in group["params"]}
        return self._group_of[parameter]


def _accumulation(what: str) -> EarlyGradientError:
    return EarlyGradientError(
        "several backwards ran before one optimizer.step(): gradients were to be accumulated, and this "
        f"optimizer applies and drops them in each backward. {what} Step after every backward, or leave the "
        "optimizer out of the backward and keep .grad, to which gradients are added early all the same."
    )


class _InBackward:
    """What differs from the ordinary optimizer, whose class comes after this one."""

    _in_backward: tuple[_StepInBackward, list[Any]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, if there is one; its backward steps. Tells accumulated gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._in_backward[0].ended()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which step in the backward as well."""
        before = set(_parameters(self))
        super().add_param_group(param_group)  # type: ignore[misc]
        _register(self, [parameter for parameter in _parameters(self) if parameter not in before])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are ordinary optimizers."""
        return _ordinary, (type(self).__mro__[2],), self.__getstate__()

    def detach(self) -> None:
        """Make it an ordinary optimizer again."""
        for handle in self._in_backward[1]:
            handle.remove()
        self.__class__ = type(self).__mro__[2]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise EarlyGradientError(
            "a GradScaler was given an optimizer that steps in the backward: gradients are still scaled "
            "there, and have been applied so. Train in bfloat16, which needs no scaler, or with an ordinary "
            "optimizer."
        )


def _ordinary(kind: type[Optimizer]) -> Optimizer:
    """An optimizer without a state, for pickle."""
    return kind.__new__(kind)


def _stepping_in_backward(kind: type[Optimizer]) -> type[Optimizer]:
    return type(f"{kind.__name__}InBackward", (_InBackward, kind), {})


def _measured_workspace(factory: Factory, like: Tensor) -> Workspace:
    """What steps of small parameters allocate, their state apart.

    Raises
    ------
    EarlyGradientError
        If the optimizer counts steps in its groups.
    """
    try:
        with without_collection():
            few, many = (_trial(factory, like, rows) for rows in TRIAL_ROWS)
    except EarlyGradientError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever an optimizer's own step raises)
        logger.warning("the optimizer cannot be tried alone (%s): its workspace is guessed", error)
        return Workspace(GUESSED, 0)
    (small, small_peak), (large, large_peak) = few, many
    each = max(0, -((small_peak - large_peak) // (large - small)))
    return Workspace(each, max(0, small_peak - each * small))


def _trial(factory: Factory, like: Tensor, rows: int) -> tuple[int, int]:
    """Bytes of a small parameter, and what its second step allocates."""
    twin = nn.Parameter(torch.zeros(rows, 256, dtype=like.dtype, device=like.device))
    optimizer = factory([twin])
    if [id(each) for each in _parameters(optimizer)] != [id(twin)]:
        raise _other_parameters()
    groups = [dict(group) for group in optimizer.param_groups]
    twin.grad = torch.ones_like(twin)
    optimizer.step()
    for before, after in zip(groups, optimizer.param_groups, strict=True):
        counted = [name for name, value in after.items() if before.get(name) is not value]
        if counted:
            raise EarlyGradientError(
                f"{type(optimizer).__name__} keeps what changes with each step in its param_groups "
                f"({', '.join(counted)}), so that it cannot step parameter by parameter"
            )
    ((peak, _),) = peaks_of([lambda: partial(optimizer.step)], like.device.type)
    return twin.numel() * twin.element_size(), peak

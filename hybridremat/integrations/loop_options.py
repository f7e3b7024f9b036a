"""The options of a callback for training loops, validated when it is made, and the module they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hybridremat.errors import ModelError, OptionsError
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import SETTING_NAMES, Settings, WrapSettings, did_you_mean
from hybridremat.runtime.halving import LEAST_STEPS
from hybridremat.runtime.planned_call import planned_call
from hybridremat.runtime.prepare import given_plan
from hybridremat.units import is_count


class WrapOptions(WrapSettings, total=False):
    """The keyword arguments of :func:`hybridremat.wrap` that a loop's callback takes."""

    plan: Plan | str | Path | None
    progress: bool


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How a loop is planned and watched. The callbacks explain each field."""

    settings: Settings
    plan: Plan | None = None
    progress: bool = True
    module: str | None = None
    measure_every: int | None = None
    plain_steps: int = 0
    tolerance: float = 0.03
    report: bool = True
    tune_steps: int | None = None

    def validated(self) -> LoopOptions:
        """These options, or a typed error about the first one that cannot be used.

        A limit or an overhead may be missing: a model that its owner has wrapped needs none.

        Raises
        ------
        LimitError, CostModelError
            As :meth:`Settings.validated`.
        OptionsError
            For an option of the callback itself.
        """
        self.settings.validated(need_limit=False)
        if self.module is not None and not isinstance(self.module, str):
            raise OptionsError(
                f"module={self.module!r} is not a name: give the dotted name of a submodule, as "
                "named_modules() has it, or None"
            )
        if self.measure_every is not None:
            _whole("measure_every", self.measure_every, 1, "of steps between measurements, or None")
        _whole("plain_steps", self.plain_steps, 0, "of steps that run plain")
        if self.tune_steps is not None:
            _whole("tune_steps", self.tune_steps, LEAST_STEPS, "of steps that compare schedules, or None")
        _fraction("tolerance", self.tolerance)
        if not isinstance(self.report, bool):
            raise OptionsError(f"report={self.report!r}: give True or False, whether a report is written")
        return self


def loop_options(wrap_options: Mapping[str, Any], **own: Any) -> LoopOptions:
    """Options from wrap's keyword arguments, and those of the callback itself.

    Raises
    ------
    LimitError, CostModelError, OptionsError, PlanFormatError
        For the first one that is not known or cannot be used.
    """
    known = {*SETTING_NAMES, "plan", "progress"}
    unknown = [name for name in wrap_options if name not in known]
    if unknown:
        names, meant = ", ".join([*sorted(known), *own]), did_you_mean(unknown[0], known)
        raise OptionsError(
            f"options that are not known: {', '.join(map(repr, unknown))}{meant} There are {names}. Sample "
            "inputs are not needed: the plan is made for what the loop passes, on each rank alone."
        )
    given = dict(wrap_options)
    plan, progress = given.pop("plan", None), bool(given.pop("progress", True))
    settings = Settings(**given)
    if plan is not None:
        plan = given_plan(plan, settings)
        settings = settings.following(plan)
    return LoopOptions(settings=settings, plan=plan, progress=progress, **own).validated()


def _whole(name: str, value: object, least: int, what: str) -> None:
    if not is_count(value, least):
        raise OptionsError(f"{name}={value!r} is out of range: give a number ≥ {least} {what}")


def _fraction(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf"):
        raise OptionsError(f"{name}={value!r} is out of range: give a fraction ≥ 0, such as 0.03 for 3 %")


def find_target(model: nn.Module, name: str | None) -> nn.Module:
    """The module called ``name``; without a name the one that is wrapped already, or else the model itself.

    Raises
    ------
    ModelError
        If there is no such module, or others are wrapped already.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    wrapped = {inner: module for inner, module in modules.items() if planned_call(module) is not None}
    if name is None and len(wrapped) == 1:
        return next(iter(wrapped.values()))
    target = _submodule(model, name or "")
    others = [inner or "the model itself" for inner, module in wrapped.items() if module is not target]
    if others:
        raise ModelError(
            f"parts of this {type(model).__name__} are already wrapped: {', '.join(others)}. Name the one to "
            "be watched with module=, or call hybridremat.unwrap on what is not to be planned on its own."
        )
    return target


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        found: nn.Module = model.get_submodule(name)
    except AttributeError:
        children = ", ".join(inner for inner, _ in model.named_children()) or "none"
        raise ModelError(
            f"{type(model).__name__} has no submodule {name!r}; its own submodules are: {children}. "
            "named_modules() lists the names of all."
        ) from None
    return found

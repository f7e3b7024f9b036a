"""The commands ``plan`` and ``inspect``."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from hybridremat.api import plan as make_plan
from hybridremat.errors import PolicyError, TargetError
from hybridremat.explanation_text import block_text, module_text
from hybridremat.explanations import BlockExplanation, ModuleExplanation
from hybridremat.plan_file import read_plan, write_plan
from hybridremat.plans import Plan
from hybridremat.policy import Action, validated_policy
from hybridremat.report import plan_tables, render, summary
from hybridremat.targets import load_target


def run_plan(options: Namespace) -> int:
    """Plan, print the summary (or all of it as JSON), and write the file that was asked for."""
    plan = _planned(options)
    if options.output is not None:
        write_plan(plan, options.output)
    if options.json:
        sys.stdout.write(json.dumps(plan.to_dict(), indent=1) + "\n")
    else:
        render([summary(plan)], sys.stdout)
    return 0


def run_inspect(options: Namespace) -> int:
    """Print the blocks of a plan, made now or read from a file; or one block, or one module, in full."""
    plan = read_plan(options.target) if _is_plan_file(options.target) else _planned(options)
    if options.html is not None:
        plan.to_html(options.html)
    shown = _shown(plan, options)
    if options.json:
        sys.stdout.write(json.dumps(shown.to_dict(), indent=1) + "\n")
    elif isinstance(shown, Plan):
        render(plan_tables(shown, everything=options.all), sys.stdout)
    elif isinstance(shown, BlockExplanation):
        render(block_text(shown, everything=options.all), sys.stdout)
    else:
        render(module_text(shown), sys.stdout)
    return 0


def _shown(plan: Plan, options: Namespace) -> Plan | BlockExplanation | ModuleExplanation:
    if options.block is not None:
        return plan.inspect(options.block)
    return plan.explain(options.explain) if options.explain is not None else plan


def _is_plan_file(target: str) -> bool:
    return target.endswith(".json") or (":" not in target and Path(target).is_file())


def _planned(options: Namespace) -> Plan:
    if options.limit is None and options.max_overhead is None:
        raise TargetError(
            f"say what to plan {options.target} for: --limit 6GiB, --limit 50% (of the plain step's memory), "
            "or --max-overhead 10% (least memory at no more than 10 % more time)"
        )
    target = load_target(options.target, dropout=options.dropout)
    return make_plan(
        target.model,
        target.args,
        target.kwargs,
        memory_limit=int(options.limit) if options.limit and options.limit.isdigit() else options.limit,
        max_overhead=_number(options.max_overhead),
        reserve=options.reserve,
        cost_model=options.cost_model,
        workers=options.workers,
        policy=_policy(options.pin),
    )


def _policy(pins: list[str] | None) -> dict[str, Action] | None:
    """``PATTERN=ACTION`` arguments as a policy; the last ``=`` divides."""
    if pins is None:
        return None
    policy: dict[str, Action] = {}
    for pin in pins:
        pattern, _, action = pin.rpartition("=")
        if policy.get(pattern, action) != action:
            raise PolicyError(f"--pin: {pattern!r} is pinned twice, to {policy[pattern]} and to {action}")
        policy |= validated_policy({pattern: action})
    return policy


def _number(text: str | None) -> float | str | None:
    """``0.1`` as a number; ``10%`` stays text, and so does what is no number, for the error to quote."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text

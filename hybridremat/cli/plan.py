"""The commands ``plan``, ``inspect`` and ``certify``."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from rich.text import Text

from hybridremat.analysis.needs import TrainingNeeds, training_needs
from hybridremat.api import plan as make_plan
from hybridremat.cli.inputs import load, settings_given, sizes_given
from hybridremat.cli.output import print_json, require_writable, stdout_to_stderr
from hybridremat.errors import TargetError, UsageError
from hybridremat.graph.costs.device_specs import device_spec
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import PlanSettings, Settings
from hybridremat.plans.codec import write_plan
from hybridremat.reports.explanation import BlockExplanation, ModuleExplanation, block_text, module_text
from hybridremat.reports.figures import new_figure, require_suffix
from hybridremat.reports.size_tables import size_table
from hybridremat.reports.text import certificate_dict, plan_tables, render, summary


def run_plan(options: Namespace) -> int:
    """Plan, write the file if one is named, and print the summary, or all of the plan as JSON."""
    require_writable(options.output)
    require_writable(options.curve, option="--curve")
    if options.curve is not None:
        require_suffix(options.curve)
        new_figure()
    sizes = sizes_given(options.sizes)
    if options.curve is not None and not sizes:
        raise UsageError("--curve draws the sizes that --sizes names, --sizes length=64:512:64, for one")
    if sizes and options.dynamic == "auto":
        options.dynamic = "true"  # there is but one shape to capture
    plan, needs = _planned(options, certify=options.certify)
    with stdout_to_stderr(active=options.json):
        curve = plan.curve(**sizes) if sizes else None
    if curve is not None and options.curve is not None:
        curve.plot(options.curve)
    if options.output is not None:
        write_plan(plan, options.output)
    if options.json:
        print_json(plan.to_dict() if curve is None else plan.to_dict() | {"curve": curve.to_dict()})
    else:
        memory = None if options.device_spec is None else device_spec(options.device_spec).memory
        whole = f"in all: {needs.formula(plan.needed, memory=memory)}"
        render([summary(plan), Text(whole)], sys.stdout)
        if curve is not None:
            render([Text(), size_table(curve.rows)], sys.stdout)
    return 0


def run_inspect(options: Namespace) -> int:
    """Print the blocks of a plan, made now or read from a file; or one block, or one module, in full."""
    require_writable(options.html, option="--html")
    plan = _read(options) if _is_plan_file(options.target) else _planned(options)[0]
    if options.html is not None:
        plan.to_html(options.html)
    shown = _shown(plan, options)
    if options.json:
        print_json(shown.to_dict())
    elif isinstance(shown, Plan):
        render(plan_tables(shown, everything=options.all), sys.stdout)
    elif isinstance(shown, BlockExplanation):
        render(block_text(shown, everything=options.all), sys.stdout)
    else:
        render(module_text(shown), sys.stdout)
    return 0


def run_certify(options: Namespace) -> int:
    """Certify a plan that is read from a file, write it if a file is named, and print what is proven."""
    require_writable(options.output)
    plan = Plan.load(options.plan).certified(progress=not options.quiet)
    if options.output is not None:
        write_plan(plan, options.output)
    if options.json:
        print_json(certificate_dict(plan))
    else:
        render([summary(plan)], sys.stdout)
    return 0


def _shown(plan: Plan, options: Namespace) -> Plan | BlockExplanation | ModuleExplanation:
    if options.block is not None:
        return plan.inspect(options.block)
    return plan.explain(options.explain) if options.explain is not None else plan


def _is_plan_file(target: str) -> bool:
    return target.endswith(".json") or (":" not in target and Path(target).is_file())


def _read(options: Namespace) -> Plan:
    asked = {
        "--limit": options.limit,
        "--max-overhead": options.max_overhead,
        "--set": options.sets,
        "--dropout": options.dropout,
        "--device-spec": options.device_spec,
        "--pin": options.pin,
    }
    if given := [name for name, value in asked.items() if value]:
        raise UsageError(f"{options.target} is a plan already made: {', '.join(given)} cannot change it")
    return Plan.load(options.target)


def _planned(options: Namespace, *, certify: bool = False) -> tuple[Plan, TrainingNeeds]:
    """The plan, and what training takes beside its step."""
    if options.limit is None and options.max_overhead is None:
        raise TargetError(
            f"give a limit to plan {options.target} for: --limit 6GiB, --limit 50% (of the plain step's "
            "memory), or --max-overhead 10% (least memory at no more than 10 % more time)"
        )
    asked = settings_given(options, PlanSettings.__optional_keys__)
    # a mistyped limit is refused before a large model is made
    checked = Settings(**asked).validated(need_limit=True)
    target = load(options)
    optimizer, early = getattr(options, "optimizer", "sgd"), options.gradients == "in_backward"
    needs = training_needs(target, optimizer, checked.spec, early_gradients=early)
    with stdout_to_stderr(active=options.json):
        plan = make_plan(
            target.model, target.args, target.kwargs, progress=not options.quiet, certify=certify, **asked
        )
    return plan, needs

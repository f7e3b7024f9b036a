"""The options of all commands, and a parser that raises its errors, so that they can be JSON too.

Only argparse loads here: ``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from hybridremat.errors import UsageError

COST_MODELS = "source of times: profile (default), roofline or flops"
TARGET_HELP = """\
TARGET is a built-in model (gpt2, llama, bert, t5, vit, resnet50, unet), module:function or file.py:function.
The function returns (model, kwargs) or (model, args, kwargs): what one training step passes."""
SET_HELP = "field of a built-in model's config, or argument of your function; repeatable (n_layer=24)"
PIN_HELP = "MODULE[:OP]=must_save or =must_recompute, both globs: h.*.mlp.act=must_recompute; repeatable"
OPTIMIZER_HELP = "adamw (default), sgd,momentum=0.9, adamw,foreach=False, … or module:Class"
DYNAMIC_HELP = "one capture for all input sizes: auto (default: from the second shape on), true or false"
SIZES_HELP = "also plan at length=64,128,256 or batch=2:16:2 (FROM:TO:STEP); repeatable"
DEVICE_HELP = "plan for another device: h200, a100-80g, rtx4090, … or a JSON or TOML file"


class Parser(argparse.ArgumentParser):
    """Raises a :class:`~hybridremat.errors.UsageError` where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises
        ------
        UsageError
        """
        raise UsageError(message, usage=self.format_usage())


def shared_options(*, target: bool = True, required: bool = True) -> list[Parser]:
    """Parent parsers with the options that commands share.

    Parameters
    ----------
    target
        Whether the command plans something: ``TARGET`` and how it is made, costs, workers, cache, device.
    required
        Whether ``TARGET`` must be given.
    """
    parents = [_output_options()]
    if target:
        parents += [_target_options(required=required), _planning_options()]
    return parents


def limit_options() -> Parser:
    """The limit, and what the caller's code does besides one forward and its backward."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("limit")
    group.add_argument("--limit", metavar="SIZE", help="most step memory: 6GiB, 6442450944, or 50%% of plain")
    group.add_argument("--max-overhead", metavar="SHARE", help="most extra time: 0.1 or 10%%")
    group.add_argument("--reserve", metavar="SIZE", default="0", help="bytes of the limit kept for your code")
    group.add_argument(
        "--on-infeasible", metavar="WHAT", default="error", help="error (default), or least: the leanest plan"
    )
    step = parser.add_argument_group("step")
    step.add_argument("--hold-outputs", action="store_true", help="your code keeps all outputs")
    step.add_argument("--forwards", type=int, metavar="N", default=1, help="forwards that wait at one time")
    return parser


def _output_options() -> Parser:
    # No defaults: a flag given before the command holds unless it is given again after it.
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks of errors, and the log")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress, no warnings")
    parser.add_argument("--json", action="store_true", help="only JSON on the standard output")
    return parser


def _target_options(*, required: bool) -> Parser:
    parser = Parser(add_help=False)
    count = None if required else "?"
    parser.add_argument("target", metavar="TARGET", nargs=count, help="what to plan (gpt2, train.py:make, …)")
    group = parser.add_argument_group("model")
    group.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="sets", help=SET_HELP)
    group.add_argument("--dropout", type=float, metavar="P", help="every dropout of a built-in model")
    return parser


def _planning_options() -> Parser:
    parser = Parser(add_help=False)
    group = parser.add_argument_group("planning")
    group.add_argument("--cost-model", metavar="NAME", default="profile", help=COST_MODELS)
    group.add_argument("--compiler", metavar="NAME", default="eager", help="eager (default), or inductor")
    group.add_argument(
        "--gradients", metavar="NAME", default="at_end", help="at_end (default), or in_backward"
    )
    group.add_argument("--outputs", metavar="NAME", default="all", help="all (default), or loss")
    group.add_argument("--graph-breaks", metavar="WHAT", default="auto", help="auto (default), plan or error")
    group.add_argument(
        "--units", metavar="PATTERN", action="append", default=[], help="plan these modules each by itself"
    )
    group.add_argument(
        "--rewrites", metavar="NAME", default="exact", help="exact (default), chunked (the loss), or none"
    )
    group.add_argument(
        "--untried",
        metavar="NAME",
        default="error",
        help="kernels that cannot be tried alone: error (default), or allow (not counted)",
    )
    group.add_argument(
        "--strategy",
        metavar="NAME",
        default="hybrid",
        help="hybrid (default), or for comparison plain, sqrt, every-block, min-peak, rotor, rockmate, "
        "checkmate, checkmate-lp, layers-lp; offload-all, offload-inputs (with --offload)",
    )
    group.add_argument(
        "--block-solver", metavar="NAME", default="auto", help="auto (default), exact, or cp-sat"
    )
    group.add_argument(
        "--planning-budget", metavar="TIME", help="end the search by then: 10s, 2min; unlimited: search on"
    )
    group.add_argument("--offload", metavar="WHERE", help="values may wait there: host, or file:FOLDER")
    group.add_argument("--host-memory-limit", metavar="SIZE", help="that they may take (default: half of it)")
    group.add_argument("--dynamic", metavar="WHAT", default="auto", help=DYNAMIC_HELP)
    group.add_argument("--workers", type=int, metavar="N", help="processes that solve (default: one a core)")
    group.add_argument("--pin", metavar="PIN", action="append", help=PIN_HELP)
    group.add_argument("--no-cache", action="store_true", help="neither read nor keep plans, kernel figures")
    group.add_argument("--device-spec", metavar="NAME|FILE", help=DEVICE_HELP)
    return parser


def unknown_command(name: str, commands: Sequence[str]) -> UsageError:
    """The error for an unknown command."""
    close = get_close_matches(name, commands, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    if not close and (":" in name or name.endswith((".json", ".py")) or Path(name).is_file()):
        hint = f"to plan or show it: hybridremat plan {name} …, hybridremat inspect {name}. "
    return UsageError(f"there is no command {name!r}; {hint}Commands: {', '.join(commands)}.")


def unknown_option(words: Sequence[str], parser: argparse.ArgumentParser) -> UsageError:
    """The error for arguments that a command does not know."""
    known = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", parser.format_help())))
    hints = []
    for word in words:
        close = get_close_matches(word.partition("=")[0], known, n=1)
        hints.append(f"{word} (did you mean {close[0]}?)" if word.startswith("-") and close else word)
    return UsageError(f"not understood: {' '.join(hints)}", usage=parser.format_usage())


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hybridremat demo`` alone."""
    add = parser.add_argument
    add("--quick", action="store_true", help="one model, one limit, and a report")
    add("-o", "--output", metavar="FOLDER", help="for what --quick writes (default: hybridremat-demo)")
    parser.add_argument("--models", metavar="A,B", help="some of gpt2, resnet50, llama, unet (default: all)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default: 3)")
    parser.add_argument("--cost-model", metavar="NAME", default="profile", help=COST_MODELS)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads (default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hybridremat batch`` alone."""
    add = parser.add_argument
    add("--limit", metavar="SIZE", help="most step memory: 6GiB or 6442450944")
    add("--max-overhead", metavar="SHARE", help="most extra time against the plain step of that batch")
    add("--reserve", metavar="SIZE", default="0", help="bytes of the limit kept free for your own code")
    add("--start", type=int, default=1, metavar="N", help="the batch to try first (default: 1)")
    add("--most", type=int, default=65536, metavar="N", help="the largest batch to try (default: 65536)")
    add("-o", "--output", metavar="FILE", help="write the plan of that batch as JSON to this file")


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hybridremat fit`` alone."""
    add = parser.add_argument
    add("--optimizer", metavar="NAME", default="adamw", help=OPTIMIZER_HELP)
    add("--memory", metavar="SIZE", help="what the device has: 24GiB (default: what there is)")
    add("--margin", metavar="SIZE", help="bytes to be kept free (default: on CUDA 2%%, at least 256 MiB)")
    add("--max-overhead", metavar="SHARE", help="most extra time: 0.1 or 10%%")
    add("--reserve", metavar="SIZE", default="0", help="bytes of the limit kept free for your own code")
    add("--no-batch", action="store_true", help="do not look for the largest batch")
    add("--most", type=int, default=65536, metavar="N", help="the largest batch to try (default: 65536)")
    group = parser.add_argument_group("several devices")
    add = group.add_argument
    add("--gpus", type=int, metavar="N", help="over how many devices training is spread")
    add("--shard", metavar="HOW", help="fsdp2 (fully_shard of --units, by default the layers), tp or pp")
    add("--link", type=float, metavar="RATE", help="bytes in a second from one to the next: 450e9")
    add("--microbatches", type=int, metavar="N", help="of pp: in one step (default: two for each device)")
    add("--param-dtype", metavar="NAME", help="of fsdp2: in which parameters are gathered: bfloat16")
    add("--reduce-dtype", metavar="NAME", help="of fsdp2: in which gradients are reduced: float32")


def add_frontier_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hybridremat frontier`` alone."""
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", action="append", help=".png, .svg, .pdf, .csv or .json; repeatable")
    add("--limit", metavar="SIZE", help="mark the fastest plan under this limit: 6GiB, or 50%% of plain")
    add("--max-overhead", metavar="SHARE", help="mark the smallest plan within this extra time: 0.1 or 10%%")
    add("--certify", action="store_true", help="also bound the overhead from below, and the least memory")
    add("--measure", type=int, metavar="K", help="run and measure the plain step and K plans of the curve")


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hybridremat compare`` alone."""
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", action="append", help=".png, .svg, .pdf, .csv or .json; repeatable")
    add(
        "--limit",
        metavar="SIZE",
        action="append",
        help="compare under this limit: 6GiB, or 50%% of plain; repeatable (default: 90%% to 20%% by tens)",
    )
    add(
        "--frontier",
        action="store_true",
        help="compare whole frontiers: what they hold at every twentieth of the plain step's memory",
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hybridremat plan`` alone."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON to this file")
    parser.add_argument("--certify", action="store_true", help="prove how near it is to the best there is")
    parser.add_argument("--optimizer", metavar="NAME", default="adamw", help=OPTIMIZER_HELP)
    parser.add_argument("--sizes", metavar="NAME=SIZES", action="append", default=[], help=SIZES_HELP)
    parser.add_argument("--curve", metavar="FILE", help="draw --sizes to this .png, .svg or .pdf")


def add_certify_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hybridremat certify`` alone."""
    parser.add_argument("plan", metavar="PLAN", help="a file that `hybridremat plan -o` wrote")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the certified plan to this file")


def add_inspect_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hybridremat inspect`` alone."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--block", type=int, metavar="N", help="one block: its values, what binds, its options")
    one.add_argument("--explain", metavar="MODULE", help="one module: what becomes of each of its values")
    parser.add_argument("--all", action="store_true", help="each block, or each option, by itself")
    parser.add_argument("--html", metavar="FILE", help="also write a report for the browser to this file")


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hybridremat cache`` alone."""
    parser.add_argument("--clear", action="store_true", help="delete the kept plans and kernel figures")


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hybridremat doctor`` alone."""
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--no-compile", action="store_true", help="do not try a compiled step")

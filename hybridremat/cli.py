"""The command ``hybridremat``: demo, plan, inspect, frontier, batch.

Only argparse and the errors load here; a command loads what it needs when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import hybridremat
from hybridremat.batch_command import add_batch_options
from hybridremat.errors import HybridRematError
from hybridremat.frontier_command import add_frontier_options

EXAMPLES = """\
examples:
  hybridremat demo                                      train three real models under a limit, side by side
  hybridremat plan gpt2 --limit 60%                     what the limit costs in time
  hybridremat plan train.py:make --limit 6GiB -o p.json your own: make() returns (model, kwargs)
  hybridremat inspect p.json                            what the plan keeps and makes again, block by block
  hybridremat inspect p.json --block 3                  every value of one block
  hybridremat inspect p.json --html p.html              all of it, with charts, as one file for the browser
  hybridremat frontier gpt2 -o curve.png --limit 60%    overhead against memory, with that plan marked
  hybridremat batch train.py:make --limit 6GiB          the largest batch that fits; yours: make(batch)
"""
COST_MODELS = "source of times: profile (default), roofline or flops"
PIN = "MODULE[:OP]=must_save or =must_recompute, both globs: h.*.mlp.act=must_recompute; may be repeated"
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(
        prog="hybridremat",
        description="Train PyTorch models under a memory limit, with bit for bit the same numbers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hybridremat {hybridremat.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_demo(commands.add_parser("demo", help="train real models, plain and planned side by side"))
    plan = commands.add_parser("plan", help="plan a model's training step", **_style("plan"))
    _add_planning(plan)
    plan.add_argument("--json", action="store_true", help="print the whole plan as JSON")
    plan.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON to this file")
    inspect = commands.add_parser("inspect", help="show a plan block by block", **_style("inspect"))
    _add_planning(inspect)
    one = inspect.add_mutually_exclusive_group()
    one.add_argument("--block", type=int, metavar="N", help="one block: its values, what binds, its options")
    one.add_argument("--explain", metavar="MODULE", help="one module: what becomes of each of its values")
    inspect.add_argument("--all", action="store_true", help="each block, or each option, by itself")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.add_argument("--html", metavar="FILE", help="also write a report for the browser to this file")
    frontier = commands.add_parser("frontier", help="show overhead against memory", **_style("frontier"))
    _add_target(frontier)
    add_frontier_options(frontier)
    batch = commands.add_parser("batch", help="find the largest batch that fits a limit", **_style("batch"))
    _add_target(batch)
    add_batch_options(batch)
    return parser


def _style(command: str) -> dict[str, Any]:
    what = "a built-in model, module:function or file.py:function"
    if command == "inspect":
        what += ", or a file that `hybridremat plan -o` wrote"
    takes = "the batch size as its argument batch" if command == "batch" else "nothing"
    returns = f"A function takes {takes} and returns (model, kwargs) or (model, args, kwargs)."
    return {"description": f"TARGET is {what}. {returns}"}


def _add_planning(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    add = parser.add_argument
    add("--limit", metavar="SIZE", help="most step memory: 6GiB, 6442450944, or 50%% of the plain step's")
    add("--max-overhead", metavar="SHARE", help="most extra time: 0.1 or 10%%")
    add("--reserve", metavar="SIZE", default="0", help="bytes of the limit kept free for your own code")


def _add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help="what to plan (gpt2, train.py:make, …)")
    add("--cost-model", metavar="NAME", default="profile", help=COST_MODELS)
    add("--pin", action="append", metavar="PIN", help=PIN)
    add("--dropout", type=float, default=0.0, metavar="P", help="dropout of a built-in model")
    add("--workers", type=int, metavar="N", help="processes that solve blocks (default: one a core)")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains GPT-2, ResNet-50 and Llama models (small, random weights, nothing downloaded) for several "
        "optimizer steps, plain and under two limits each, and compares numbers, memory and time."
    )
    parser.add_argument("--models", metavar="A,B", help="some of gpt2, resnet50, llama (default: all)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default: 3)")
    parser.add_argument("--cost-model", metavar="NAME", default="profile", help=COST_MODELS)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads (default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0; 1 if the demo found a difference or a limit that was passed; 2 for an error; 130 after Ctrl-C.
    """
    options = build_parser().parse_args(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # `| head`: nobody reads any more; leave the interpreter nothing to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (HybridRematError, OSError) as error:
        if options.verbose:
            traceback.print_exc()
        sys.stderr.write(f"hybridremat: {' '.join(str(error).split())}\n")
        return MISUSED


def _run(options: argparse.Namespace) -> int:
    if options.command == "demo":
        from hybridremat.demo import run_demo

        return run_demo(options)
    if options.command == "frontier":
        from hybridremat.frontier_command import run_frontier

        return run_frontier(options)
    if options.command == "batch":
        from hybridremat.batch_command import run_batch

        return run_batch(options)
    from hybridremat import commands

    return commands.run_plan(options) if options.command == "plan" else commands.run_inspect(options)


if __name__ == "__main__":
    sys.exit(main())

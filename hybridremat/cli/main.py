"""The command ``hybridremat``: its subcommands, and their exit statuses.

Only argparse and the errors load here; a command's own module loads when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import hybridremat
from hybridremat.cli.options import (
    TARGET_HELP,
    Parser,
    add_batch_options,
    add_cache_options,
    add_certify_options,
    add_compare_options,
    add_demo_options,
    add_doctor_options,
    add_fit_options,
    add_frontier_options,
    add_inspect_options,
    add_plan_options,
    limit_options,
    shared_options,
    unknown_command,
    unknown_option,
)
from hybridremat.cli.output import discard_stdout, log_to_stderr, print_error
from hybridremat.errors import HybridRematError, UsageError
from hybridremat.interrupts import prompt_interrupts

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

EXAMPLES = """\
examples:
  hybridremat demo --quick                              train one model under a limit, and write a report
  hybridremat demo                                      train four real models under a limit, side by side
  hybridremat plan gpt2 --limit 60%                     what the limit costs in time
  hybridremat plan train.py:make --limit 6GiB -o p.json your own: make() returns (model, kwargs)
  hybridremat inspect p.json                            what the plan keeps and makes again, block by block
  hybridremat inspect p.json --block 3                  every value of one block
  hybridremat inspect p.json --html p.html              all of it, with charts, as one file for the browser
  hybridremat certify p.json                            how near it is to the best there is, proven
  hybridremat frontier gpt2 -o curve.png --limit 60%    overhead against memory, with that plan marked
  hybridremat compare gpt2 --limit 50%                  every published strategy on the same problem
  hybridremat batch train.py:make --limit 6GiB          the largest batch that fits; yours: make(batch)
  hybridremat fit train.py:make --device-spec h100      whether it fits, parameters to step, and the limit
  hybridremat cache                                     what is kept on disk, and how much
  hybridremat doctor                                    what is installed here, and whether it works

exit status:
  0  done
  1  fit: it does not fit; the demo found a difference or a limit that was passed; the doctor, something
     that does not work
  2  not understood, or it cannot be done: one line on the standard error says why (-v: with a traceback);
     with --json the standard output then holds {"error": …, "message": …}
  130  interrupted (Ctrl-C)
"""
DEMO_EXAMPLES = """\
examples:
  hybridremat demo --quick
  hybridremat demo
  hybridremat demo --models gpt2 --steps 1 --json
"""
PLAN_EXAMPLES = """\
examples:
  hybridremat plan gpt2 --limit 60%
  hybridremat plan gpt2 --limit 60% --set n_layer=24 --set batch=8 --set length=1024
  hybridremat plan train.py:make --set depth=48 --limit 6GiB -o plan.json
  hybridremat plan llama --max-overhead 10% --json | jq .predicted_peak
  hybridremat plan gpt2 --limit 60% --set dtype=bfloat16 --device-spec h200
"""
INSPECT_EXAMPLES = """\
examples:
  hybridremat inspect plan.json
  hybridremat inspect plan.json --block 3
  hybridremat inspect plan.json --block 3 --json
  hybridremat inspect plan.json --explain transformer.h.0.attn
  hybridremat inspect plan.json --html plan.html
  hybridremat inspect gpt2 --limit 60%
"""
CERTIFY_EXAMPLES = """\
examples:
  hybridremat certify plan.json
  hybridremat certify plan.json -o certified.json
  hybridremat certify plan.json --json
"""
FRONTIER_EXAMPLES = """\
examples:
  hybridremat frontier gpt2
  hybridremat frontier gpt2 --certify
  hybridremat frontier gpt2 --limit 60% -o curve.png -o curve.csv
  hybridremat frontier llama --set num_hidden_layers=2 --measure 5 --json
"""
COMPARE_EXAMPLES = """\
examples:
  hybridremat compare gpt2
  hybridremat compare gpt2 --limit 60% --limit 30% -o compared.png -o compared.csv
  hybridremat compare llama --cost-model flops --json
"""
BATCH_EXAMPLES = """\
examples:
  hybridremat batch gpt2 --limit 1GiB
  hybridremat batch train.py:make --limit 6GiB --max-overhead 10% -o plan.json
"""
FIT_EXAMPLES = """\
examples:
  hybridremat fit gpt2 --optimizer adamw --memory 2GiB
  hybridremat fit train.py:make --device-spec rtx4090
  hybridremat fit train.py:make --optimizer sgd,momentum=0.9 --set batch=64 --json
  hybridremat fit train.py:make --device-spec h100 --gpus 8 --shard fsdp2
  hybridremat fit train.py:make --device-spec h100 --gpus 4 --shard pp --microbatches 16
"""
CACHE_EXAMPLES = """\
examples:
  hybridremat cache
  hybridremat cache --json
  hybridremat cache --clear
"""
DOCTOR_EXAMPLES = """\
examples:
  hybridremat doctor
  hybridremat doctor --no-compile
  hybridremat doctor --json
"""


@dataclass(frozen=True)
class Command:
    """One command: the function that runs it (``module:function``), its options, and its help."""

    help: str
    home: str
    parents: Callable[[], list[Parser]]
    add: Callable[[argparse.ArgumentParser], None]
    description: str
    examples: str


COMMANDS = {
    "demo": Command(
        "train real models, plain and planned side by side",
        "hybridremat.cli.demo:run_demo",
        lambda: shared_options(target=False),
        add_demo_options,
        "Trains GPT-2, ResNet-50, Llama and U-Net models (small, random weights, nothing downloaded) for\n"
        "several optimizer steps, plain and under limits, and compares numbers, memory and time.",
        DEMO_EXAMPLES,
    ),
    "plan": Command(
        "plan a model's training step",
        "hybridremat.cli.plan:run_plan",
        lambda: [*shared_options(), limit_options()],
        add_plan_options,
        TARGET_HELP,
        PLAN_EXAMPLES,
    ),
    "inspect": Command(
        "show a plan block by block",
        "hybridremat.cli.plan:run_inspect",
        lambda: [*shared_options(), limit_options()],
        add_inspect_options,
        f"{TARGET_HELP}\nOr TARGET is a file that `hybridremat plan -o` wrote.",
        INSPECT_EXAMPLES,
    ),
    "certify": Command(
        "prove how near a plan is to the best there is",
        "hybridremat.cli.plan:run_certify",
        lambda: shared_options(target=False),
        add_certify_options,
        "Computes the time that no schedule of the plan's graph beats under its limit, and the bytes of\n"
        "step memory that none goes below. Nothing is planned again, and the model is not needed.",
        CERTIFY_EXAMPLES,
    ),
    "frontier": Command(
        "show overhead against memory",
        "hybridremat.cli.frontier:run_frontier",
        shared_options,
        add_frontier_options,
        TARGET_HELP,
        FRONTIER_EXAMPLES,
    ),
    "compare": Command(
        "show every strategy on the same problem",
        "hybridremat.cli.compare:run_compare",
        shared_options,
        add_compare_options,
        TARGET_HELP,
        COMPARE_EXAMPLES,
    ),
    "fit": Command(
        "say whether training fits a device, and at which limit",
        "hybridremat.cli.fit:run_fit",
        shared_options,
        add_fit_options,
        f"{TARGET_HELP}\nIf yours takes batch, and no --set gives it, the largest batch is looked for, too.",
        FIT_EXAMPLES,
    ),
    "batch": Command(
        "find the largest batch that fits a limit",
        "hybridremat.cli.batch:run_batch",
        shared_options,
        add_batch_options,
        f"{TARGET_HELP}\nA function of yours is given the batch size as its argument batch.",
        BATCH_EXAMPLES,
    ),
    "cache": Command(
        "show or empty what is kept on disk between runs",
        "hybridremat.cli.cache:run_cache",
        lambda: shared_options(target=False),
        add_cache_options,
        "Plans and kernel figures are kept in one folder, which HYBRIDREMAT_CACHE names.",
        CACHE_EXAMPLES,
    ),
    "doctor": Command(
        "say what is installed here, and whether it works",
        "hybridremat.cli.doctor:run_doctor",
        lambda: shared_options(target=False),
        add_doctor_options,
        "Looks at versions, devices, compilers and caches, and runs a small wrapped step, op by op and\n"
        "compiled, against the same step plain: predicted and measured peak, and whether numbers are equal.",
        DOCTOR_EXAMPLES,
    ),
}


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and that of each command."""
    parser = Parser(
        prog="hybridremat",
        description="Train PyTorch models under a memory limit, with bit for bit the same numbers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=shared_options(target=False),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hybridremat {hybridremat.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=Parser)
    return parser, {name: _added(commands, name, command) for name, command in COMMANDS.items()}


def _added(commands: argparse._SubParsersAction[Parser], name: str, command: Command) -> Parser:
    parser = commands.add_parser(
        name,
        help=command.help,
        description=command.description,
        epilog=command.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=command.parents(),
        allow_abbrev=False,
    )
    command.add(parser)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments.

    Raises
    ------
    UsageError
        If there is no command, or the arguments cannot be understood.
    """
    parser, commands = build_parser()
    named = next((word for word in arguments if not word.startswith("-")), None)
    if named is not None and named not in commands:
        raise unknown_command(named, tuple(commands))
    flags = argparse.Namespace(verbose=False, quiet=False, json=False)
    options, unknown = parser.parse_known_args(arguments, flags)
    if unknown:
        raise unknown_option(unknown, commands.get(options.command, parser))
    if options.command is None:
        raise UsageError(f"no command is given. Commands: {', '.join(commands)}.", usage=parser.format_help())
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0; 1 if training does not fit, the demo finds a difference or an exceeded limit, or the doctor something
    that does not work; 2 for an error; 130 after Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _run(words)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


def _run(words: Sequence[str]) -> int:
    # if the arguments themselves are the error, these two still say how to write it
    options = argparse.Namespace(verbose="-v" in words or "--verbose" in words, json="--json" in words)
    try:
        options = parse(words)
        with prompt_interrupts(quiet=True), log_to_stderr(verbose=options.verbose, quiet=options.quiet):
            status = _run_command(options)
        sys.stdout.flush()  # here, so that a full disk is reported as an error
        return status
    except BrokenPipeError:  # as in `| head`
        discard_stdout()
        return FAILED
    except (HybridRematError, OSError) as error:
        if isinstance(error, UsageError):
            sys.stderr.write(error.usage)
        print_error(error, verbose=options.verbose, as_json=options.json)
        return MISUSED


def _run_command(options: argparse.Namespace) -> int:
    module, _, function = COMMANDS[options.command].home.partition(":")
    run: Callable[[argparse.Namespace], int] = getattr(import_module(module), function)
    return run(options)

"""What ``hybridremat demo`` takes. Apart from the demo, so that help and a typo load nothing."""

from __future__ import annotations

import argparse

from hybridremat.cli_options import COST_MODELS


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the demo alone."""
    parser.add_argument("--models", metavar="A,B", help="some of gpt2, resnet50, llama (default: all)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default: 3)")
    parser.add_argument("--cost-model", metavar="NAME", default="profile", help=COST_MODELS)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads (default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")

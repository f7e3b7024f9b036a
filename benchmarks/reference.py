"""What scripts that measure the eight reference models one by one have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from generated import Row, in_a_process, read_rows, write_rows
from marks import recorded_models

PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"

TITLES: Final[Mapping[str, str]] = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "bert": "BERT",
    "vit": "ViT",
    "t5": "T5",
    "resnet50": "ResNet-50",
    "unet": "U-Net",
}


def title(name: str) -> str:
    """A model's name on pages: ``"GPT-2, dropout 0.1"`` for ``"gpt2_0.1"``."""
    base, _, dropout = name.partition("_")
    return f"{TITLES[base]}, dropout {dropout}" if dropout else TITLES[base]


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """A model and its batch, with one thread, as the recorded figures were made."""
    import torch

    from hybridremat.zoo.models import reference_model

    torch.set_num_threads(1)
    base, _, dropout = name.partition("_")
    return reference_model(base, float(dropout or 0))


def options_of(description: str | None) -> argparse.Namespace:
    """``names`` of the models to measure, none with ``--pages``; and ``here``: one to do in this process."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(recorded_models())}; else all")
    parser.add_argument("--pages", action="store_true", help="only write the page from the rows")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in recorded_models()]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(recorded_models())}")
    options.names = [] if options.pages else options.names or [*recorded_models()]
    return options


def measured_again(script: str, path: Path, columns: Sequence[str], names: Sequence[str]) -> list[Row]:
    """All rows of a file, those of some models made anew by the script, each in a process of its own."""
    for name in names:
        rows = [row for row in read_rows(path) if row["model"] != name]
        rows += in_a_process(script, "--here", name)
        rows.sort(key=lambda row: recorded_models().index(row["model"]))
        write_rows(path, columns, rows)
        print(f"{name}: measured", file=sys.stderr)
    return read_rows(path)

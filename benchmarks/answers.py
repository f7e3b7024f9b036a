"""What the benchmarks say, in a line for each question: the head of docs/benchmarks.md.

    python benchmarks/answers.py

Nothing is measured: the figures are those of the rows that the other scripts keep in ``data/``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from generated import Row, read_rows, write_part
from marks import per_layer_checkpoint
from planning import least
from real_size import gib
from reference import title
from sizes import split

SCRIPT: Final = "answers.py"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
DATA: Final = Path(__file__).with_name("data")
MOVED: Final = "GPT-2 medium 8×1024, a10"
LINK: Final = 25.0  # GB/s, of PCIe 4.0


def rows(name: str) -> list[Row]:
    """The rows of a script."""
    return read_rows(DATA / f"{name}.csv")


def trained(found: Sequence[Row]) -> str:
    """Of steps that were trained under limits: bits, limits, predictions."""
    equal = sum(json.loads(row["differing"]) == [] for row in found)
    kept = sum(int(row["measured_peak"]) <= int(row["limit"]) for row in found)
    return (
        f"In {equal} of {len(found)} runs every loss, gradient, buffer and parameter of three optimizer "
        f"steps is plain PyTorch's, bit for bit; in {kept} no step passed its limit"
    )


def real(found: Sequence[Row]) -> str:
    """Of a model at real size."""
    plain, checkpointed, planned = found
    less = [
        f"{gib(each['step'])} and × {float(each['ratio']):.2f} the time" for each in (checkpointed, planned)
    ]
    return (
        f"A step of GPT-2 124M with {plain['batch']} × {plain['length']} tokens takes {gib(plain['step'])}; "
        f"with each block checkpointed {less[0]}; planned {less[1]}"
    )


def instead(name: str, ours: float, theirs: float) -> str:
    """A model's figure and the one that it stands beside, in percent."""
    return f"{title(name)} {ours:.1f} instead of {theirs:.1f} %"


def beside_checkpoints(found: Sequence[Row]) -> str:
    """Of per-layer checkpointing: extra flops at its memory."""
    cells = []
    for row in found:
        theirs, ours = per_layer_checkpoint(row["model"]), json.loads(row["per_layer"])
        cells += [instead(row["model"], ours[0], theirs[0].extra)] if theirs else []
    return f"In the memory of a checkpoint around each layer, extra flops: {', '.join(cells)}"


def smallest(found: Sequence[Row]) -> str:
    """Of least peaks."""
    shares = sorted(float(row["least"]) for row in found)
    return f"Without moves, to {shares[0]:.0f} to {shares[-1]:.0f} % of plain eager's, by model"


def nearness(found: Sequence[Row]) -> str:
    """Of what is proven."""
    usual = [row for row in found if float(row["percent"]) >= 40 and row["limit"].rstrip(" %").isdigit()]
    gaps = sorted(float(row["gap"]) for row in usual)
    worst = max(usual, key=lambda row: float(row["gap"]))
    return (
        f"At 40 % and above, no schedule is faster by more than {statistics.median(gaps):.2f} % of a step in "
        f"the median of {len(gaps)} cases, and {gaps[-1]:.1f} % in the worst one "
        f"({title(worst['model'])} at {worst['limit']}); this is proven"
    )


def planning_time(found: Sequence[Row]) -> str:
    """Of planning beside a plain capture."""
    seconds, ratios = [], []
    for name in dict.fromkeys(row["model"] for row in found):
        mine = [row for row in found if row["model"] == name]
        plain, cold = (float(least(mine, how)["seconds"]) for how in ("plain", "planned cold"))
        seconds.append(cold)
        ratios.append(cold / plain)
    return (
        f"{min(seconds):.0f} to {max(seconds):.0f} s for {len(seconds)} models at 60 %, which is "
        f"{statistics.median(ratios):.1f} times (median; {min(ratios):.1f} to {max(ratios):.1f}) what "
        '`torch.compile(backend="aot_eager")` takes'
    )


def lengths(found: Sequence[Row]) -> str:
    """Of a run with many lengths."""
    tight = [row for row in found if row["limit"] == "40%"]
    known, new = split(tight)
    later = [statistics.median(float(row["seconds"]) for row in each) for each in (known, new) if each]
    return (
        f"At 40 %, one capture of {float(tight[0]['seconds']):.0f} s for all of them, then "
        f"{min(later):.1f} to {max(later):.1f} s for each new length"
    )


def moves(found: Sequence[Row]) -> str:
    """Of values that move, on paper."""
    mine = [each for each in found if each["model"] == MOVED and float(each["link"]) == LINK]
    (row,) = (each for each in mine if each["limit"] == "40 %")
    return (
        f"By data sheets, GPT-2 medium on an A10 at 40 % takes {row['recomputed']} % longer by recomputation "
        f"alone, and {row['ours']} % with moves over {LINK:.0f} GB/s"
    )


def devices(found: Sequence[Row]) -> str:
    """Of units under FSDP2."""
    cells = [
        instead(row["model"], float(row["ours_flops"]), float(row["checkpoint_flops"])) for row in found
    ]
    return f"With FSDP2, in the memory of a checkpoint around each layer, extra flops: {', '.join(cells)}"


def answers() -> Iterator[tuple[str, str, str]]:
    """Each question, its answer, and the section of its rows."""
    yield "Is it the same training under its limit?", trained(rows("demo")), "training-under-a-limit"
    yield "What does it do at real size?", real(rows("real_size")), "gpt-2-124m-at-real-size"
    found = rows("frontiers")
    yield "Is it better than checkpointing?", beside_checkpoints(found), "frontiers-of-eight-models"
    yield "How small can a step get?", smallest(found), "below-the-floor-of-recomputation"
    yield "Could a plan be better?", nearness(rows("gaps")), "optimality-gaps"
    planning = planning_time(rows("planning"))
    yield "How long does planning take?", planning, "planning-beside-a-plain-capture"
    yield "My batches have many lengths", lengths(rows("sizes")), "many-lengths-from-one-capture"
    yield "Are moves to host memory worth it?", moves(rows("offload")), "moves-to-host-memory"
    yield "On several devices?", devices(rows("fsdp")), "under-fsdp2"


def part() -> str:
    """What the script writes into the page."""
    lines = (f"| {question} | {answer} ([rows](#{anchor})). |" for question, answer, anchor in answers())
    return "\n".join(("| | |", "|---|---|", *lines))


if __name__ == "__main__":
    write_part(PAGE, SCRIPT, part())

"""Planning of deep models, up to twenty thousand ops, and of a large one on the ``meta`` device.

    python benchmarks/scale.py [NAME …] [--pages]

CPU seconds by stage, each model in a process of its own, one thread, cost model ``flops`` (of the large one
the roofline of ``h100-80g``). Rows go to ``data/scale.csv``, the table from them to docs/benchmarks.md;
``--pages`` does only that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from generated import Row, cpu_seconds, in_a_process, loads, read_rows, write_part, write_rows

SCRIPT: Final = "scale.py"
ROWS: Final = Path(__file__).with_name("data") / "scale.csv"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
COLUMNS: Final = (
    *("model", "limit", "ops", "blocks", "planning", "stages", "peak", "overhead", "MiB"),
    *("load", "date", "torch"),
)

NARROW: Final = {"n_embd": 64, "n_head": 2, "batch": 2, "length": 64, "vocab_size": 512}
LARGE: Final = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LENGTH: Final = 4096
STAGES: Final = ("costs", "segment", "solve blocks", "compose", "improve", "capture and emit")

MODELS: Final[Mapping[str, tuple[str, Mapping[str, Any], str]]] = {
    **{f"GPT-2, {n} layers of width 64": ("gpt2", {"n_layer": n, **NARROW}, "40%") for n in (12, 24, 48)},
    **{f"GPT-2, {n} layers of width 64": ("gpt2", {"n_layer": n, **NARROW}, "40%") for n in (96, 192, 416)},
    "Llama, 8 billion parameters, on meta": ("llama on meta", LARGE, "20GiB"),
}


def on_meta(changes: Mapping[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A model without memory, its inputs, and how it is planned."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(max_position_embeddings=LENGTH, use_cache=False, **changes)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}, {"device_spec": "h100-80g"}


def measured(name: str) -> Row:
    """The figures of one model, planned in this process."""
    time.perf_counter = cpu_seconds  # planning times its stages by this clock
    import torch

    import hybridremat
    from hybridremat.zoo.models import reference_model

    torch.set_num_threads(1)
    target, changes, limit = MODELS[name]
    load = os.getloadavg()[0]
    if target == "llama on meta":
        model, batch, how = on_meta(changes)
    else:
        model, batch = reference_model(target, 0.0, changes)
        how = {"cost_model": "flops"}
    started = cpu_seconds()
    plan = hybridremat.plan(model, kwargs=batch, memory_limit=limit, progress=False, **how)
    assert plan.details is not None
    return {
        "model": name,
        "limit": limit,
        "ops": len(plan.details.graph.ops),
        "blocks": len(plan.blocks),
        "planning": round(cpu_seconds() - started, 1),
        "stages": json.dumps({stage: round(plan.timings[stage], 1) for stage in STAGES}),
        "peak": round(100 * plan.predicted_peak / plan.plain_peak, 1),
        "overhead": round(100 * plan.overhead, 1),
        "MiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "load": round(load, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
    }


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *table_of(rows)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the table."""
    return (
        f"`python benchmarks/scale.py`: CPU seconds, {max(row['date'] for row in rows)}, torch "
        f"{rows[-1]['torch']}, one thread, 2 cores with {loads(rows)}, "
        "empty cache, cost model `flops`; the Llama in bfloat16 with 4096 tokens, for `h100-80g`. In "
        "brackets: milliseconds an op. *Memory* is the most of the process."
    )


def table_of(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    yield "| model | ops | blocks | limit | extra time | planning | " + " | ".join(STAGES) + " | memory |"
    yield "|" + "---|" * (7 + len(STAGES))
    for row in rows:
        stages, ops = json.loads(row["stages"]), int(row["ops"])
        seconds = [f"{each:.1f} ({1000 * each / ops:.1f})" for each in (stages[stage] for stage in STAGES)]
        figures = [row["model"], row["ops"], row["blocks"], row["limit"], f"{row['overhead']} %"]
        cells = [*figures, f"{float(row['planning']):.0f} s", *seconds, f"{row['MiB']} MiB"]
        yield "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Measure the models asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(options.here)))
        return
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(MODELS)}")
    rows = {row["model"]: row for row in read_rows(ROWS)}
    for name in () if options.pages else options.names or MODELS:
        rows[name] = in_a_process(__file__, "--here", name)
        kept = [rows[each] for each in MODELS if each in rows]
        write_rows(ROWS, COLUMNS, kept)
    write_part(PAGE, SCRIPT, part([rows[each] for each in MODELS if each in rows]))


if __name__ == "__main__":
    main()

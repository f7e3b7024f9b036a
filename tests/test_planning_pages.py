"""The table of what planning takes: from rows to the page, with nothing written by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import chains
import generated
import planning
import pytest
import scale
import step_times


def row(how: str, seconds: float, **stages: float) -> dict[str, str]:
    text = {"model": "U-Net", "how": how, "seconds": str(seconds), "stages": json.dumps(stages)}
    return text | {"load": "0.5", "date": "2026-11-23", "torch": "2.13.0"}


def test_the_least_of_repeats_is_held_against_what_was_asked_for() -> None:
    rows = [row("plain", 3.0), row("plain", 2.0), row("planned cold", 5.2, solve=1.0, compose=2.0)]
    (line,) = list(planning.table([*rows, row("planned warm", 1.0)]))[2:]
    assert line == "| U-Net | 2.0 s | 5.2 s | **2.60**, 2.5 | 1.0 s | solve 1.0, compose 2.0 |"
    (line,) = list(planning.table([*rows, row("planned cold", 5.0), row("planned warm", 1.0)]))[2:]
    assert "| 2.50, 2.5 |" in line


@pytest.mark.parametrize("script", [planning, chains, scale, step_times])
def test_the_page_holds_the_rows_that_are_kept(script) -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    written = text.partition(generated.begin(script.SCRIPT))[2].partition(generated.END)[0]
    assert written.strip() == script.part(generated.read_rows(script.ROWS))


def test_rows_are_read_as_they_were_written(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    assert generated.read_rows(path) == []
    generated.write_rows(path, ("a", "b"), [{"a": "1, 2"}, {"a": "3", "b": "4"}])
    assert generated.read_rows(path) == [{"a": "1, 2", "b": ""}, {"a": "3", "b": "4"}]

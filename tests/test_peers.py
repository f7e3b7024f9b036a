"""The benchmark of peers: what its tables say of rows, and one peer whose figures are known."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import peers
import peers_pages
from marks import DATA
from peers_methods import METHODS

EMPTY = dict.fromkeys(peers.COLUMNS, "")


def row(method, setting, peak, extra, **more):
    about = {"model": "net", "device": "cpu", "torch": "2", "date": "d", "gradients": "equal"}
    about |= {"time_ratio": "1.5"}
    figures = {"peak_bytes": peak, "extra_flops_percent": extra, "prepared_seconds": "2.4"}
    return EMPTY | about | {"method": method, "setting": setting} | figures | more


ROWS = [
    row("eager", "", "1000", "0.0"),
    row("checkpoint", "every", "600", "30.0"),
    row("partition", "0.5", "500", "4.0", gradients="differ", error="1e-6", eager_error="1e-6"),
    row("partition", "0.2", "400", "4.0", gradients="differ", error="1e-2", eager_error="1e-6"),
    row("switch", "", "", "", gradients="not applicable: no switch"),
    row("hybrid", "600", "590", "15.0", predicted_bytes="590", time_ratio="1.1"),
    row("hybrid", "400", "400", "40.0", predicted_bytes="400", time_ratio="1.4"),
    row("hybrid", "500", "", "2.5", predicted_bytes="500", time_ratio="", gradients=""),
]


def test_a_table_holds_what_is_ours_against_each_peer():
    _, _, *lines = peers_pages.table(ROWS)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells == [
        ["eager", "", "100.0 %", "0.0 %", "equal", "1.50", "2 s", "**2.5 %**"],
        ["checkpoint", "every", "60.0 %", "30.0 %", "equal", "1.50", "2 s", "2.5 %"],
        ["partition", "0.5", "50.0 %", "4.0 %", "1.0 ×", "1.50", "2 s", "**2.5 %**"],
        ["partition", "0.2", "40.0 %", "4.0 %", "10000.0 ×", "1.50", "2 s", "40.0 %, 1.40"],
        ["switch", "", "", "", "not applicable: no switch", "", "", ""],
    ]


def test_gradients_are_correct_if_they_are_about_as_near_to_float64_as_eagers():
    assert [peers_pages.is_correct(each) for each in ROWS[:5]] == [True, True, True, False, False]


def test_pages_are_written_between_their_marks(tmp_path, monkeypatch):
    monkeypatch.setattr(peers_pages, "DOCS", tmp_path)
    (tmp_path / "images").mkdir()
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{peers_pages.BEGIN}\nof May\n{peers_pages.END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        peers_pages.write_pages(ROWS)
        text = page.read_text(encoding="utf-8")
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "of May" not in text
        assert text.count("### net on cpu") == 1
        assert "Least peaks by strategy, with their extra flops: `hybrid` 40.0 % with 40.0 %." in text
    assert (tmp_path / "images" / "peers-net-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_rows_are_kept_and_replaced(tmp_path):
    rows = peers.Rows(tmp_path / "rows.csv")
    rows.replace([], ROWS[:2])
    again = peers.Rows(tmp_path / "rows.csv")
    assert again.rows == ROWS[:2]
    again.replace(again.of("net", "cpu", "checkpoint"), [ROWS[2]])
    assert peers.Rows(tmp_path / "rows.csv").rows == [ROWS[0], ROWS[2]]


def test_what_is_to_be_measured_follows_from_what_was(tmp_path):
    rows = peers.Rows(tmp_path / "rows.csv")
    rows.rows = list(ROWS)
    assert list(peers.asked(rows, "net", "cpu", ["checkpoint", "hybrid"])) == [
        ("checkpoint", "every"), ("checkpoint", "every second"), ("hybrid", "planned"),
        ("hybrid", "600"), ("hybrid", "500"), ("hybrid", "400"), ("hybrid", "400"),
    ]  # fmt: skip


def test_the_rows_that_are_kept_reach_the_marks():
    """At the peak of a correct peer: at most half of its extra flops, or a point; the rows say where not."""
    with (DATA / "peers.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows and set(rows[0]) == set(peers.COLUMNS)
    for each in rows:
        if each["method"] == "hybrid" and each["peak_bytes"]:
            assert each["gradients"] == "equal", each
            assert int(each["peak_bytes"]) == int(each["predicted_bytes"]) <= int(each["setting"]), each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "setting", "peak", "extra", "gradients"),
    [("checkpoint", "every", 59880416, 20.69, "equal"), ("partition", "0.4", 100672524, 13.218, "differ")],
)
def test_a_peer_has_the_figures_that_are_known(method, setting, peak, extra, gradients):
    """Of GPT-2, measured before by other means."""
    (found,) = peers.run("gpt2", method, setting, "cpu", pairs=1)
    assert found["peak_bytes"] == peak
    assert found["extra_flops_percent"] == pytest.approx(extra, abs=0.01)
    assert found["gradients"] == gradients and peers_pages.is_correct({**EMPTY, **found})
    assert setting in METHODS[method].settings

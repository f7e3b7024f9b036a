"""print(plan): every block in exactly one row, bytes that add up, and text that fits its columns."""

import io
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.errors import InputError, PlanFormatError
from hybridremat.graph.joint import Schedule, short_op
from hybridremat.planning.plan import Plan
from hybridremat.plans.codec import checksum, plan_from_dict, write_plan
from hybridremat.plans.records import PlannedBlock, ValueRecord
from hybridremat.reports.block_rows import block_rows, module_names, module_tail
from hybridremat.reports.explanation import block_text
from hybridremat.reports.largest import recomputed_groups, saved_groups
from hybridremat.reports.text import plan_tables, render
from hybridremat.units import format_time


def block(index, layer, *, option=1, saved=1000, part="mlp", runs=1) -> PlannedBlock:
    modules = (f"net.h.{layer}.{part}.first", f"net.h.{layer}.{part}.second")
    value = ValueRecord(f"v{index}", saved, (saved // 4,), "float32", "aten.addmm.default", modules[0])
    again = ValueRecord(f"w{index}", 64, (16,), "float32", "aten.gelu.default", modules[1])
    return PlannedBlock(
        index=index,
        modules=modules,
        forward_ops=4,
        backward_ops=7,
        option=option,
        option_count=9,
        solo=False,
        forward_runs=runs,
        saved=(value,),
        recomputed=((again, runs),),
        saved_bytes=saved,
        forward_peak=2 * saved,
        backward_peak=3 * saved,
        forward_time=1000,
        extra_time=10,
    )


def plan_of(blocks, **figures) -> Plan:
    given = {
        "memory_limit": 5000,
        "asked_limit": 5000,
        "predicted_peak": 4000,
        "plain_peak": 9000,
        "needed": 5000,
        "least_peak": 3000,
        "overhead": 0.05,
        "extra_flops": 0.04,
        "saved_bytes": sum(b.saved_bytes for b in blocks),
        "cost_model": "flops",
        "fingerprint": "f",
        "schedule": Schedule((0, 1, 0, 2), 2),
        "timings": {"segment": 0.5},
    }
    return Plan(**{**given, **figures}, blocks=tuple(blocks))


BLOCKS = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from([1000, 2000]), st.sampled_from(["mlp", "attn"]), st.integers(1, 2)
    ),
    min_size=1,
    max_size=12,
).map(
    lambda parts: [
        block(i, i, option=option, saved=saved, part=part, runs=runs)
        for i, (option, saved, part, runs) in enumerate(parts)
    ]
)


def numbers(text: str) -> list[int]:
    """``1, 3–5`` read back."""
    found = []
    for part in text.split(", "):
        first, _, last = part.partition("–")
        found += range(int(first), int(last or first) + 1)
    return found


@given(BLOCKS)
def test_every_block_is_in_exactly_one_row(blocks):
    rows = block_rows(blocks)
    assert Counter(i for row in rows for i in numbers(row.indices)) == Counter(range(len(blocks)))
    assert [b.index for row in rows for b in row.blocks] == [i for row in rows for i in numbers(row.indices)]


@given(BLOCKS)
def test_rows_are_merged_if_and_only_if_their_decisions_are_the_same(blocks):
    def decision(b):
        return b.option, b.saved_bytes, b.modules[0].split(".")[-2], b.forward_runs

    rows = block_rows(blocks)
    assert all(len({decision(b) for b in row.blocks}) == 1 for row in rows)
    assert len({decision(row.first) for row in rows}) == len(rows)


@given(BLOCKS)
def test_bytes_of_the_rows_add_up_to_the_plan(blocks):
    rows = block_rows(blocks)
    assert sum(row.first.saved_bytes * len(row.blocks) for row in rows) == plan_of(blocks).saved_bytes


@given(BLOCKS)
def test_text_is_plain_and_fits(blocks):
    text = str(plan_of(blocks))
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 120
    assert all(line == line.rstrip() for line in text.splitlines())
    assert f"all {len(blocks)}" in text
    assert "4000 bytes" in text
    assert "5000 bytes" in text


def test_the_environment_changes_no_text(monkeypatch):
    plan = plan_of([block(0, 0)])
    before = str(plan)
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "dumb", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    assert str(plan) == before


def test_layers_that_follow_one_another_are_named_from_first_to_last():
    (row,) = block_rows([block(i, i + 3) for i in range(4)])
    assert (row.indices, row.name, len(row.blocks)) == ("0–3", "net.h.3 … net.h.6", 4)


def test_layers_with_others_between_them_are_named_by_their_numbers():
    blocks = [block(i, i // 2, part="attn" if i % 2 else "mlp") for i in range(6)]
    assert [row.name for row in block_rows(blocks)] == ["net.h.{0–2}.mlp", "net.h.{0–2}.attn"]


def test_modules_that_blocks_share_do_not_name_them():
    shared = replace(block(0, 0), modules=("net.h.0.mlp.first", "net.h.0", "net.mask"))
    other = replace(block(1, 0), modules=("net.mask", "net.h.0.ln", "net.h.0"))
    assert module_names([shared, other]) == {0: ("net.h.0.mlp",), 1: ("net.h.0.ln",)}
    alone = replace(block(2, 0), modules=())
    assert block_rows([alone])[0].name == "(no module)"


@pytest.mark.parametrize(
    ("module", "prefix", "tail"),
    [
        ("net.h.3.mlp.c_fc", "", "mlp.c_fc"),
        ("net.h.3.ln_1", "", "h.3.ln_1"),
        ("net.h.3.ln_1", "net.h.3", "ln_1"),
        ("stages.0.layers.1.layer.2.convolution", "stages.0.layers.1", "layer.2.convolution"),
        ("", "", ""),
    ],
)
def test_module_tails(module, prefix, tail):
    assert module_tail(module, prefix) == tail


def test_op_names_are_short():
    names = ["aten.native_layer_norm.default", "aten._softmax.default", "custom"]
    assert [short_op(name) for name in names] == ["layer_norm", "softmax", "custom"]


@given(st.integers(0, 10**13))
def test_times_are_within_a_percent_of_what_they_stand_for(nanoseconds):
    amount, unit = format_time(nanoseconds).split()
    size = {"ns": 1, "µs": 10**3, "ms": 10**6, "s": 10**9}[unit]
    assert float(amount) * size == pytest.approx(nanoseconds, rel=0.01)


def test_one_block_shows_every_value():
    out = io.StringIO()
    plan = plan_of([block(0, 0), block(1, 1)])
    render(block_text(plan.inspect(1)), out)
    assert re.search(r"SAVE +1000 B +250 +float32 +addmm +0 ns +first", out.getvalue())
    assert re.search(r"RECOMPUTE 1× +64 B +16 +float32 +gelu", out.getvalue())
    with pytest.raises(InputError, match="no block 2; this plan has blocks 0 to 1"):
        plan.inspect(2)


@given(BLOCKS)
def test_plans_survive_json(blocks):
    plan = plan_of(blocks)
    again = plan_from_dict(plan.to_dict(), Plan)
    assert again == plan
    assert str(again) == str(plan)


def test_plan_files(tmp_path):
    plan = plan_of([block(0, 0)])
    write_plan(plan, tmp_path / "p.json")
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    assert Plan.load(tmp_path / "p.json") == plan
    (tmp_path / "cut.json").write_text((tmp_path / "p.json").read_text()[:-20])
    with pytest.raises(PlanFormatError, match="not a plan: it is not JSON"):
        Plan.load(tmp_path / "cut.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.pop("schema"), "no schema version"),
        (lambda d: d.update(schema=99), "schema version 99; this hybridremat reads versions 4 to"),
        (lambda d: d.pop("schedule"), "damaged"),
        (lambda d: d.pop("overhead"), "damaged"),
        (lambda d: d.update(more=1), "damaged"),
        (lambda d: d["blocks"][0].pop("modules"), "damaged"),
        (lambda d: d["blocks"].append(3), "damaged"),
    ],
)
@pytest.mark.parametrize("resealed", [False, True])
def test_damaged_plans_are_refused(damage, message, resealed):
    data = plan_of([block(0, 0)]).to_dict()
    damage(data)
    if resealed:
        data["checksum"] = checksum(data)
    with pytest.raises(PlanFormatError, match=message):
        plan_from_dict(data, Plan)


def test_tables_are_data_until_rendered():
    assert len(plan_tables(plan_of([block(0, 0)]))) == 5


@given(BLOCKS)
def test_the_largest_values_come_first_and_every_value_is_in_one_group(blocks):
    for groups, values in (
        (saved_groups(blocks), [(b.index, v) for b in blocks for v in b.saved]),
        (recomputed_groups(blocks), [(b.index, v) for b in blocks for v, _ in b.recomputed]),
    ):
        assert sum(group.total for group in groups) == sum(v.bytes for _, v in values)
        assert sum(group.copies for group in groups) == len(values)
        assert [group.total for group in groups] == sorted((g.total for g in groups), reverse=True)
        kinds = {(v.op, v.module.split(".")[3], v.bytes): set() for _, v in values}
        for index, v in values:
            kinds[v.op, v.module.split(".")[3], v.bytes].add(index)
        assert sorted(group.blocks for group in groups) == sorted(tuple(sorted(k)) for k in kinds.values())


def test_the_text_begins_with_the_largest_values_and_ends_with_its_terms():
    blocks = [block(i, i, saved=1000 * (i + 1)) for i in range(7)]
    lines = str(plan_of(blocks)).splitlines()
    assert [re.split("  +", line)[1] for line in lines[:5]] == [
        "6.84 KiB", "5.86 KiB", "4.88 KiB", "3.91 KiB", "2.93 KiB",
    ]  # fmt: skip
    assert re.split("  +", lines[0]) == ["most saved", "6.84 KiB", "addmm net.h.6.mlp.first", "block 6"]
    again = ["most recomputed", "64 B ×7", "gelu net.h.{0–6}.mlp.second", "blocks 0–6"]
    assert re.split("  +", lines[5]) == again and lines[6] == "" and lines[7].startswith("limit ")
    legend = lines[max(n for n, line in enumerate(lines) if line.startswith("most saved")) :]
    assert all(len(line) <= 100 for line in (*lines[:7], *legend))
    terms = [re.split("  +", line)[0] for line in legend if not line.startswith(" ")]
    assert terms[:4] == ["most saved", "most recomputed", "limit", "predicted peak"]
    assert terms[-6:] == ["block", "ops", "option", "bytes", "time", "terms"] and "graph break" not in terms
    # what is summed up and said beside the figures explains itself; every other line has its meaning
    named = {re.split("  +", line)[0] for line in lines[7:14]} - {"planning", ""}
    assert named <= set(terms)


def test_long_names_leave_the_first_lines_readable():
    value = ValueRecord("v", 4096, (1024,), "float32", "aten.addmm.default", "net." * 40 + "last")
    wide = replace(block(0, 0), saved=(value,) * 3, recomputed=())
    lines = str(plan_of([wide])).splitlines()
    assert len(lines[0]) <= 100 and "last" in lines[0]
    assert lines[1].split() == ["most", "recomputed", "nothing"]


def test_a_loaded_plan_prints_the_same(tmp_path):
    plan = plan_of([block(i, i) for i in range(3)])
    plan.save(tmp_path / "plan.json")
    assert str(Plan.load(tmp_path / "plan.json")) == str(plan)

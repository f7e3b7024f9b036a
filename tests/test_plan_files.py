"""Plan files of every schema that is read: they load, explain and apply; what is damaged is a typed error."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridremat
from hybridremat.errors import PlanFormatError, PlanMismatchError
from hybridremat.planning.plan import Plan
from hybridremat.plans.codec import OLDEST, SCHEMA, checksum, plan_from_dict, plan_to_dict
from support.older_plans import ASKED, FILES, asked, made, read
from support.training import train

# Since schema 6, the gradient of a cross-entropy is one op, so these are other graphs.
OTHER_GRAPHS = ["4-classes", "4-class-breaks"]
SAME_GRAPHS = [file for file in FILES if file not in OTHER_GRAPHS]


def loaded(file: str) -> Plan:
    return plan_from_dict(read(file), Plan)


def test_there_is_a_file_of_each_schema_that_is_read():
    assert {read(file)["schema"] for file in FILES} == set(range(OLDEST, SCHEMA))


@pytest.mark.parametrize("file", FILES)
def test_an_older_file_is_read_whole_and_shown(file, tmp_path):
    plan, data, name = loaded(file), read(file), asked(file)
    assert plan.request.memory_limit == ASKED[name]["memory_limit"]
    assert (plan.reserve, plan.forwards, plan.compiler) == (ASKED[name].get("reserve", 0), 1, "eager")
    assert len(plan.parts) == (2 if name.endswith("breaks") else 0)
    assert [pin.pattern for pin in plan.pins] == list(ASKED[name].get("policy", ()))
    assert plan.request.gradients == ASKED[name].get("gradients", "at_end")
    assert plan.schedule.steps == tuple(data["schedule"]["steps"])
    assert {part.origin.model for part in (plan, *plan.parts)} == {"Net"}
    assert "limit" in str(plan) and plan.inspect(0).block.modules
    assert plan.explain("first.0").values
    plan.save(tmp_path / "now.json")
    assert Plan.load(tmp_path / "now.json") == plan
    assert json.loads((tmp_path / "now.json").read_text())["schema"] == SCHEMA


@pytest.mark.filterwarnings("ignore::hybridremat.KeptGradientWarning")
@pytest.mark.parametrize("file", SAME_GRAPHS)
def test_an_older_file_is_applied_to_the_graph_that_it_is_for(file):
    plan, (model, batch) = loaded(file), made(file)
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=batch, plan=plan, progress=False)
    applied = hybridremat.get_plan(model)
    assert applied.schedule == plan.schedule
    assert plan.parts or applied.memory_limit == plan.memory_limit  # else a share of what is plain now
    assert [part.schedule for part in applied.parts] == [part.schedule for part in plan.parts]
    trained = train(model, batch)
    assert train(plain, batch).differences(trained) == []


@pytest.mark.parametrize("file", OTHER_GRAPHS)
def test_a_graph_that_is_captured_otherwise_since_is_named(file):
    model, batch = made(file)
    with pytest.raises(PlanMismatchError, match=r"is hybridremat\.nll_log_softmax.*was (aten\.)?nll_loss"):
        hybridremat.wrap(model, kwargs=batch, plan=loaded(file), progress=False)


def test_memory_is_counted_by_the_rules_of_now():
    """What the backward reads last was not written over yet."""
    plan, data = loaded("4-class-breaks"), read("4-class-breaks")
    assert any(p.predicted_peak < d["predicted_peak"] for p, d in zip(plan.parts, data["parts"], strict=True))


@pytest.mark.parametrize(
    ("schema", "instead"),
    [(SCHEMA + 1, "update hybridremat"), (10**30, "update"), (OLDEST - 1, "make the plan again")]
    + [(other, "make the plan again") for other in (None, True, "6", 6.0, float("nan"), [])],
)
def test_other_schemas_say_what_to_do(schema, instead):
    with pytest.raises(PlanFormatError, match=f"reads versions {OLDEST} to {SCHEMA}: {instead}"):
        plan_from_dict(read("5-plain") | {"schema": schema}, Plan)


def places(data: object, path: tuple = ()) -> list[tuple]:
    """The path to everything in JSON data."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(found for key, each in inner for found in places(each, (*path, key)))]


WHOLE = {file: read(file) for file in ("4-plain", "5-pins", "6-breaks")}
WHOLE |= {"now": json.loads(json.dumps(loaded("6-last-pins").to_dict()))}
PLACES = {file: places(data)[1:] for file, data in WHOLE.items()}
DAMAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 99),
    st.sampled_from([10**30, -(10**30), float("nan"), float("inf"), 0.5, "", "x", [], {}, [[]], {"x": 1}]),
)


@given(st.data(), st.sampled_from(sorted(WHOLE)), DAMAGE, st.booleans())
def test_whatever_is_damaged_is_an_error_of_the_format(data, file, damage, dropped):
    """Under a checksum that fits, so that every part of the file has to be looked at."""
    whole = copy.deepcopy(WHOLE[file])
    *above, last = data.draw(st.sampled_from(PLACES[file]))
    holder = whole
    for key in above:
        holder = holder[key]
    if dropped:
        del holder[last]
    else:
        holder[last] = damage
    if "schema" in whole:
        whole["checksum"] = checksum(whole)
    try:
        plan = plan_from_dict(whole, Plan)
    except PlanFormatError:
        return
    assert plan.to_dict()["schema"] == SCHEMA  # names, times and the like may be anything


@given(st.sampled_from(sorted(WHOLE)), st.integers(0), st.binary(max_size=3), st.integers(0, 3))
def test_whatever_is_overwritten_in_a_file_is_noticed(tmp_path_factory, file, place, content, gone):
    text = json.dumps(WHOLE[file]).encode()
    place %= len(text)
    changed = text[:place] + content + text[place + gone :]
    path = tmp_path_factory.mktemp("damaged") / "plan.json"
    path.write_bytes(changed)
    try:
        plan = Plan.load(path)
    except PlanFormatError:
        return
    assert plan == plan_from_dict(WHOLE[file], Plan)


@pytest.mark.parametrize("change", [{"strategy": "nope"}, {"policy": {"b": "zz"}}, {"forwards": "two"}])
def test_a_value_that_is_not_known_is_a_typed_error(change):
    """As in the file of a later release of the same schema."""
    model, batch = made(FILES[0])
    data = plan_to_dict(hybridremat.plan(model, kwargs=batch, memory_limit="100%", cost_model="flops"))
    data["request"] |= change
    with pytest.raises(PlanFormatError, match="damaged"):
        plan_from_dict(data | {"checksum": checksum(data)}, Plan)

"""The request of a plan: every setting that it depends on is stored, compared and followed."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, replace

import numpy as np
import pytest

import hybridremat
from hybridremat.graph.costs.device_specs import DEVICE_SPECS
from hybridremat.planning.plan import Plan
from hybridremat.planning.plan_cache import plan_key
from hybridremat.planning.settings import PlanSettings, Settings, WrapSettings
from hybridremat.plans.codec import plan_from_dict
from hybridremat.plans.fsdp import Fsdp
from hybridremat.plans.request import Request
from support.older_plans import read

OTHER = {
    "memory_limit": "50%",
    "max_overhead": 0.2,
    "reserve": 1024,
    "cost_model": "roofline",
    "hold_outputs": True,
    "grad_outputs": "all",
    "forwards": 3,
    "on_infeasible": "least",
    "graph_breaks": "plan",
    "units": ("layers.*",),
    "fsdp": Fsdp(8, param_dtype="bfloat16", reduce_dtype="float32", reshard_after_forward=False),
    "gathers": "plan",
    "reckoning": "what is left",
    "granted": 77,
    "device_spec": DEVICE_SPECS["h200"],
    "policy": {"second.1": "must_recompute"},
    "compiler": "inductor",
    "rewrites": "none",
    "gradients": "in_backward",
    "outputs": "loss",
    "strategy": "rotor",
    "offload": "host",
    "host_memory_limit": 4096,
    "block_solver": "exact",
    "planning_budget": 5,
    "untried": "allow",
}
"""A value of every field that is not its default."""


def a_plan(request: Request) -> Plan:
    """A plan that asked for other things; nothing else of it fits."""
    return replace(plan_from_dict(read("5-plain"), Plan), request=request)


def test_every_field_has_another_value():
    assert OTHER.keys() == {item.name for item in fields(Request)}
    assert all(OTHER[item.name] != item.default for item in fields(Request))


@pytest.mark.parametrize("name", OTHER)
def test_every_field_is_stored_and_distinguishes_plans(name):
    settings = Settings(**{name: OTHER[name]})
    request = settings.request()
    assert getattr(request, name) == OTHER[name] and type(request) is Request
    assert request != Settings().request()
    assert plan_key("f", settings, "cpu", reused=False) != plan_key("f", Settings(), "cpu", reused=False)
    if name not in ("compiler", "gradients"):  # with which the figures of that plan do not fit
        plan = a_plan(request)
        assert plan_from_dict(json.loads(json.dumps(plan.to_dict())), Plan).request == request


def test_a_given_plan_brings_what_it_was_asked_for_where_nothing_else_is_given():
    plan = a_plan(Request(**OTHER))
    followed = Settings(graph_breaks="auto", untried="error", cost_model="flops", workers=3).following(plan)
    own = {"cost_model", "on_infeasible", "granted", "device_spec"}
    own |= {"block_solver", "planning_budget", "untried"}
    brought = {name for name, other in OTHER.items() if getattr(followed, name) == other}
    assert brought == OTHER.keys() - own
    assert (followed.cost_model, followed.workers) == ("flops", 3)
    assert Settings(reserve=64).following(plan).reserve == 64
    assert Settings(reserve="1KiB").request() == Settings(reserve=1024).request()


def test_numbers_of_numpy_are_stored():
    settings = Settings(memory_limit=np.int64(9), max_overhead=np.float32(0.5), granted=np.int32(3))
    assert json.dumps([settings.memory_limit, settings.max_overhead, settings.granted]) == "[9, 0.5, 3]"


def test_a_cost_model_of_ones_own_is_stored_by_its_name():
    class Mine:
        name = "mine"

        def times(self, step, *_):
            return [1] * len(step.graph.ops)

    assert Settings(cost_model=Mine()).request().cost_model == "mine"


def test_the_goal_is_written_out_where_a_model_is_wrapped():
    taken = inspect.signature(hybridremat.wrap).parameters
    assert {"memory_limit", "max_overhead"} < taken.keys()
    assert WrapSettings.__optional_keys__ < {item.name for item in fields(Settings)}
    assert PlanSettings.__optional_keys__ - WrapSettings.__optional_keys__ == {"device_spec"}

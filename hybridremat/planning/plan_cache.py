"""Plans on disk, found again by graph, request and device."""

from __future__ import annotations

from functools import partial

import torch

from hybridremat.graph.costs.cost_models import COSTS_VERSION
from hybridremat.graph.costs.kernel_store import device_description
from hybridremat.planning.disk_cache import DiskCache, Kind, cache_key
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import Settings
from hybridremat.plans.codec import SCHEMA, plan_from_dict, plan_to_dict

PLANS: Kind[Plan] = Kind("plans", "the plan", plan_to_dict, partial(plan_from_dict, kind=Plan))


def plans_on_disk(settings: Settings) -> DiskCache[Plan] | None:
    """The user's plans; None if the cache is off, or the cost model is an object without a name."""
    wanted = settings.cache and isinstance(settings.cost_model, str)
    return DiskCache.of_user(PLANS) if wanted else None


def plan_key(fingerprint: str, settings: Settings, device: str, *, reused: bool) -> str:
    """The key of a plan: a hash of all that it depends on.

    ``device`` is the kind of device; with a device spec in the settings, what is here does not matter but for
    torch, which captured the graph. ``reused`` says whether options of another input shape may be in it.
    """
    here = device_description(device) if settings.spec is None else torch.__version__
    compiler = ""
    if settings.compiler != "eager":
        from hybridremat.graph.private_inductor import compiler_settings  # takes a second

        compiler = compiler_settings()
    return cache_key(fingerprint, settings.request(), here, reused, SCHEMA, COSTS_VERSION, compiler)

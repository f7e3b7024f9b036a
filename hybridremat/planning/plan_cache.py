"""Plans on disk, found again by graph, request and device."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridremat.errors import PlanFormatError
from hybridremat.files import cache_folder
from hybridremat.graph.costs.cost_models import COSTS_VERSION
from hybridremat.graph.costs.kernel_store import device_description
from hybridremat.planning.kept_files import KeptFiles, cache_size
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import Settings
from hybridremat.plans.codec import SCHEMA, plan_from_dict, plan_to_dict
from hybridremat.version import __version__, solver_version


@dataclass(frozen=True)
class PlanCache:
    """The plans in one folder, at most ``most`` bytes."""

    folder: Path
    most: int

    @classmethod
    def for_settings(cls, settings: Settings) -> PlanCache | None:
        """The user's cache; None if it is off, or the cost model is an object without a name."""
        most = cache_size()
        if not settings.cache or not most or not isinstance(settings.cost_model, str):
            return None
        return cls(cache_folder() / "plans", most)

    @property
    def _files(self) -> KeptFiles:
        return KeptFiles(self.folder, self.most, "the plan")

    def read(self, key: str) -> Plan | None:
        """The plan of a key, if there is a readable one."""
        content = self._files.read(key)
        if content is None:
            return None
        try:
            return plan_from_dict(json.loads(content), Plan)
        except (ValueError, PlanFormatError) as error:
            self._files.refuse(key, error)
            return None

    def write(self, key: str, plan: Plan) -> None:
        """Write a plan; a folder that cannot be written to is logged."""
        self._files.write(key, json.dumps(plan_to_dict(plan)).encode())


def _compiler(settings: Settings) -> str:
    """What the code of a compiled plan depends on beside the plan."""
    if settings.compiler == "eager":
        return ""
    from hybridremat.graph.private_inductor import compiler_settings  # takes a second

    return compiler_settings()


def plan_key(fingerprint: str, settings: Settings, device: str, *, reused: bool) -> str:
    """The key of a plan: a hash of all that it depends on.

    ``device`` is the kind of device; with a device spec in the settings, what is here does not matter but for
    torch, which captured the graph. ``reused`` says whether options of another input shape may be in it.
    """
    here = device_description(device) if settings.spec is None else torch.__version__
    versions = SCHEMA, COSTS_VERSION, __version__, solver_version()
    parts = fingerprint, settings.request(), here, reused, *versions, _compiler(settings)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

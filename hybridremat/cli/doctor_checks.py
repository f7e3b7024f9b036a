"""A finding of ``hybridremat doctor``, and how it comes about: an error in a look is a finding too."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from hybridremat.errors import HybridRematError

logger = logging.getLogger(__name__)

OK, MISSING, FAILED, SKIPPED = "ok", "missing", "failed", "skipped"
SECONDS = 60  # for a program that is started to look whether it works


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes
    ----------
    status
        ``ok``; ``missing``: not there, and not needed; ``failed``; ``skipped``.
    found
        What was found, in words.
    advice
        What to do, if it failed or is missing.
    figures
        What was measured, for ``--json``; sizes in bytes.
    """

    name: str
    status: str
    found: str
    advice: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)


def checked(name: str, look: Callable[[], Check], advice: str) -> Check:
    """The finding of a look; an error in it is a finding too, with ``advice``."""
    try:
        return look()
    except (Exception, SystemExit) as error:  # a broken installation raises anything at all
        logger.info("%s", name, exc_info=True)
        text = " ".join(str(error).split())
        own = "" if isinstance(error, HybridRematError) else f"{type(error).__name__}: "
        return Check(name, FAILED, f"{own}{text}", advice)


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def run_program(command: list[str]) -> str:
    """What a program prints.

    Raises
    ------
    RuntimeError
        If it fails, or takes too long.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout

"""Where values wait outside of device memory, as ``offload=`` names it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hybridremat.errors import OffloadError

HOST, FILE = "host", "file:"


@dataclass(frozen=True)
class Target:
    """Host memory, or a file in ``folder``."""

    folder: str = ""

    @staticmethod
    def of(offload: str) -> Target:
        """What ``offload=`` names; nothing is made.

        Raises
        ------
        OffloadError
            If it is neither ``"host"`` nor a folder that can be written to.
        """
        if offload == HOST:
            return Target()
        if isinstance(offload, os.PathLike):
            raise OffloadError(f'offload={offload!r} is a path: pass offload="{FILE}{offload}"')
        if not isinstance(offload, str) or not offload.startswith(FILE) or not offload[len(FILE) :]:
            raise OffloadError(f'offload={offload!r} is not known; use "host" or "file:FOLDER"')
        try:
            folder = Path(offload[len(FILE) :]).expanduser().resolve()
            tempfile.TemporaryFile(dir=folder).close()
        except (OSError, RuntimeError, ValueError) as error:  # a user that is not known, a null character
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise OffloadError(
                f"offload={offload!r} is no folder that can be written to ({why}): make it, or name another"
            ) from error
        return Target(str(folder))

    def require_usable(self, device: str) -> None:
        """Raise OffloadError if values of a step on this kind of device cannot wait here."""
        if not self.folder and device == "cpu":
            raise OffloadError(
                'offload="host" moves values out of the memory of a GPU, and this model is on the CPU, whose '
                'memory that is; use offload="file:FOLDER" on a disk, or leave offload= out'
            )
        if self.folder and device == "cuda":
            raise OffloadError(
                'offload="file:…" is for models on the CPU; use offload="host" for a GPU, whose copies to '
                "host memory do not wait for a disk"
            )

    def __str__(self) -> str:
        return f"{FILE}{self.folder}" if self.folder else HOST

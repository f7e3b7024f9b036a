"""``python -m hybridremat``, and what the command ``hybridremat`` starts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

INTERRUPTED = 130


def run() -> None:
    """Run the command line and end the process; Ctrl-C is told in one line from the first import on."""
    _open_closed_outputs()
    try:
        from hybridremat.cli.main import main

        status = main()
    except KeyboardInterrupt:  # while the command line itself was being imported
        sys.stderr.write("interrupted\n")
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: nothing more is to be said about another one
    sys.exit(status)


def _open_closed_outputs() -> None:
    """Python starts with None for a closed output (``>&-``, a service without one)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open until the process ends


if __name__ == "__main__":
    run()

"""``python -m hybridremat``, and what the command ``hybridremat`` starts."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130


def run() -> None:
    """Run the command line and end the process; Ctrl-C is told in one line from the first import on."""
    try:
        from hybridremat.cli import main

        status = main()
    except KeyboardInterrupt:  # while the command line itself was being imported
        sys.stderr.write("interrupted\n")
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: nothing more is to be said about another one
    sys.exit(status)


if __name__ == "__main__":
    run()

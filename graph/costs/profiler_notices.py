"""Keep the profiler's own notices off the terminal."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_profiler_notices() -> Iterator[None]:
    """Keep Kineto's own start and stop notices off the terminal; anything else is passed on."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            caught.seek(0)
            rest = [line for line in caught.read().splitlines(keepends=True) if not line.startswith(b"USDT:")]
            if rest:
                sys.stderr.write(b"".join(rest).decode(errors="replace"))

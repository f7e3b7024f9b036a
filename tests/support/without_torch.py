"""For tests of the mathematics alone: whoever imports torch fails."""

from __future__ import annotations


class NoTorch:
    """Finds nothing else, and refuses torch (a finder of ``sys.meta_path``)."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError for torch and what it comes with."""
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{name}: blocks, sequence, judge and bounds do without torch (make test-core)")

"""The command ``cache``: what is kept on disk between runs, and deleting it."""

from __future__ import annotations

import itertools
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridremat.cli.output import print_json
from hybridremat.files import cache_folder
from hybridremat.units import format_bytes

# Complete files, and temporary ones of a process killed as it wrote. Nothing else is ever deleted.
_PACKED = re.compile(r"(?:\.)?[0-9a-f]{32}\.json\.gz(?:\.\w+\.tmp)?")
_KERNELS = re.compile(r"(?:\.)?kernels-[0-9a-f]{16}\.json(?:\.\w+\.tmp)?")


@dataclass(frozen=True)
class CacheContent:
    """Our files in the cache folder; sizes in bytes."""

    folder: str
    plans: int
    plan_bytes: int
    options: int
    option_bytes: int
    kernel_files: int
    kernel_bytes: int


def cache_content(folder: Path) -> CacheContent:
    """Count our files; a folder that does not exist holds none."""
    figures = [(len(sizes), sum(sizes)) for sizes in (tuple(_sizes(files)) for files in _files(folder))]
    return CacheContent(str(folder), *itertools.chain(*figures))


def clear_cache(folder: Path) -> None:
    """Delete our files, and nothing else.

    Raises
    ------
    OSError
        If one cannot be deleted.
    """
    for files in _files(folder):
        for path in files:
            path.unlink(missing_ok=True)  # another process may clear as well


def run_cache(options: Namespace) -> int:
    """Print what is kept; with ``--clear`` delete it."""
    folder = cache_folder()
    content = cache_content(folder)
    if options.clear:
        clear_cache(folder)
    if options.json:
        print_json({**asdict(content), "cleared": options.clear})
    else:
        sys.stdout.write(_text(content, cleared=options.clear))
    return 0


def _files(folder: Path) -> tuple[list[Path], ...]:
    """The plans, the options of blocks, the kernels."""
    where = (folder / "plans", _PACKED), (folder / "options", _PACKED), (folder, _KERNELS)
    return tuple(list(_matching(*each)) for each in where)


def _matching(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    if folder.is_dir():
        yield from (
            path for path in sorted(folder.iterdir()) if pattern.fullmatch(path.name) and path.is_file()
        )


def _sizes(files: list[Path]) -> Iterator[int]:
    for path in files:
        try:
            yield path.stat().st_size
        except FileNotFoundError:  # deleted by another process meanwhile
            continue


def _text(content: CacheContent, *, cleared: bool) -> str:
    done = "deleted" if cleared else "kept"
    return (
        f"folder        {content.folder}\n"
        f"plans         {content.plans} {done}, {format_bytes(content.plan_bytes)}\n"
        f"blocks        {content.options} {done}, {format_bytes(content.option_bytes)}\n"
        f"kernel files  {content.kernel_files} {done}, {format_bytes(content.kernel_bytes)}\n"
    )

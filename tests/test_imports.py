"""Who may import whom: a light face, one direction, and private torch names behind one door."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hybridremat
import hybridremat.errors

ROOT = Path(__file__).parent.parent
ROOMS = ("graph", "blocks", "sequence", "hybridremat")  # each may import itself and what stands before it
PRIVATE_DOOR = "graph/private_torch.py"

BLOCK = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {banned!r}:
            raise ImportError(f"{{name}} is imported")

sys.meta_path.insert(0, Refuse())
"""
IMPORT_ALL = """
import importlib, pkgutil
import hybridremat.blocks, hybridremat.sequence
for package in (hybridremat.blocks, hybridremat.sequence):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""


def error_without(banned: set[str], code: str) -> str:
    """Run ``code`` in a new process that cannot import ``banned``, and return its error, or nothing."""
    command = [sys.executable, "-c", BLOCK.format(banned=banned) + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def sources() -> Iterator[tuple[str, str, ast.Module]]:
    """(room, path below the repository, syntax tree) of every module."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield room, path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of every import, wherever in the module it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def dotted(node: ast.AST) -> str:
    """``torch._dynamo.config`` for that expression; empty for anything but names and dots."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_private_torch(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def room_of(name: str) -> str | None:
    """The room of ``hybridremat.graph.joint``; None for what is not ours or free to all."""
    first, *rest = name.split(".")
    if first != "hybridremat" or rest[:1] == ["errors"]:
        return None
    return rest[0] if rest and rest[0] in ROOMS else "hybridremat"


def test_the_face_is_light():
    heavy = {"torch", "ortools", "networkx", "matplotlib", "rich", "numpy", "jinja2"}
    assert error_without(heavy, "import hybridremat") == ""


def test_blocks_and_sequence_import_without_torch():
    assert error_without({"torch"}, IMPORT_ALL) == ""


def test_the_guard_of_these_tests_bites():
    assert "torch is imported" in error_without({"torch"}, "import torch")


def test_every_public_name_loads_and_unknown_ones_do_not():
    assert set(hybridremat.__all__) <= set(dir(hybridremat))
    for name in hybridremat.__all__:
        assert getattr(hybridremat, name) is not None
    assert not hasattr(hybridremat, "no_such_name")


def test_every_error_is_public():
    kinds = vars(hybridremat.errors).values()
    errors = {kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)}
    assert errors - set(hybridremat.__all__) == set()


def test_a_module_never_hides_a_public_name():
    code = "import types, hybridremat\n"
    code += "".join(f"import {home}\n" for home in sorted(set(hybridremat._HOME.values())))
    code += "kinds = {name: type(getattr(hybridremat, name)) for name in hybridremat.__all__}\n"
    code += "assert types.ModuleType not in kinds.values(), kinds"
    assert error_without(set(), code) == ""


def test_imports_run_one_way():
    offenders = []
    for room, path, tree in sources():
        allowed = ROOMS[: ROOMS.index(room) + 1]
        for line, name in imported(tree):
            target = room_of(name)
            if name.startswith(".") or (target is not None and target not in allowed):
                offenders.append(f"{path}:{line} imports {name}")
    assert not offenders, "\n".join(offenders)


def test_blocks_and_sequence_never_name_torch():
    offenders = [
        f"{path}:{line} imports {name}"
        for room, path, tree in sources()
        if room in ("blocks", "sequence")
        for line, name in imported(tree)
        if name.split(".")[0] == "torch"
    ]
    assert not offenders, "\n".join(offenders)


def test_private_torch_names_stand_in_one_module():
    offenders = set()
    for _, path, tree in sources():
        if path == PRIVATE_DOOR:
            continue
        uses = [*imported(tree)]
        uses += [(node.lineno, dotted(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        offenders |= {f"{path}:{line} uses {name}" for line, name in uses if is_private_torch(name)}
    assert not offenders, "\n".join(sorted(offenders))

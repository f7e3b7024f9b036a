"""Who may import whom: a light face, one direction, and private torch names behind two doors."""

import ast
import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import networkx as nx
import pytest

import hybridremat
import hybridremat.errors

ROOT = Path(__file__).parent.parent
# The import order of the house, low to high: a module imports from its own package and from lower lines
# alone. What stands in one line does not know of each other.
ORDER = (
    ("errors",),
    ("files", "interrupts", "units", "version"),
    ("graph",),  # joint, memory, pins, outside, generated_code, the private names of PyTorch
    ("graph.opaque",),
    ("graph.segmentation", "graph.tracing"),
    ("graph.costs",),
    ("graph.rewrites",),
    ("blocks", "compiler", "zoo"),
    ("sequence",),
    ("plans",),
    ("reports",),
    ("planning",),
    ("runtime",),
    ("analysis",),
    ("integrations",),
    ("api", "dags"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
FOLDERS = ("graph", "blocks", "sequence", "hybridremat")
PRIVATE = "torch", "dynamo", "joint", "fsdp", "collectives", "inductor", "inductor_code"
PRIVATE_DOORS = tuple(f"graph/private_{name}.py" for name in PRIVATE)

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
EAGER_STEP = """
import json, sys, torch, hybridremat

def loaded():
    return sorted(name for name in sys.modules if name.split(".")[0] in ("hybridremat", "ortools"))

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
given, how = torch.randn(4, 8), {"cost_model": "flops", "progress": False, "cache": False}
hybridremat.wrap(model, (given,), memory_limit="100%", **how)
model(given).sum().backward()
after_the_step = loaded()
import hybridremat.cli.main
print(json.dumps({"step": after_the_step, "command": loaded()}))
"""


def error_without(banned: set[str], code: str) -> str:
    """Run ``code`` in a new process that cannot import ``banned``, and return its error, or nothing."""
    command = [sys.executable, "-c", BLOCK.format(banned=banned) + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Modules in a process that has planned and run an eager step, and then imported the command line."""
    command = [sys.executable, "-c", EAGER_STEP]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def sources() -> list[tuple[str, str, ast.Module]]:
    """(dotted name below hybridremat, path below the repository, syntax tree) of every module."""
    return [*parsed()]


def parsed() -> Iterator[tuple[str, str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join(parts if folder == "hybridremat" else (folder, *parts))
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield name, path.relative_to(ROOT).as_posix(), tree


def room_of(name: str) -> str:
    """The entry of :data:`ORDER` that a module (a dotted name below hybridremat) belongs to."""
    parts = name.removesuffix(".__init__").split(".")
    known = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((room for room in known if room in RANK), "__init__")


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


def modules_read(name: str, tree: ast.AST, modules: Collection[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name below hybridremat) of every import of ours, type-checking ones included."""
    for line, full in imported(tree):
        first, _, rest = full.partition(".")
        assert first, f"{name}:{line} has a relative import"
        if first != "hybridremat":
            continue
        below = rest if rest in modules or f"{rest}.__init__" in modules else rest.rpartition(".")[0]
        yield line, below or "__init__"


def test_the_face_is_light():
    heavy = {"torch", "ortools", "networkx", "matplotlib", "rich", "numpy", "jinja2"}
    assert error_without(heavy, "import hybridremat") == ""


def test_blocks_and_sequence_import_without_torch():
    assert error_without({"torch"}, IMPORT_ALL) == ""


def test_plans_that_need_no_search_do_not_wait_for_solvers(loaded):
    """OR-Tools and pandas take a third of a second in every process that solves blocks."""
    planning = {"planning.pipeline", "blocks.pareto", "blocks.worker"}
    assert {f"hybridremat.{name}" for name in planning} <= {*loaded["step"]}
    assert "ortools" not in loaded["step"]


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
    """Once such a module is imported, its package has it under that name."""
    names = {*hybridremat.__all__, *hybridremat._HOME}
    assert [name for name in sorted(names) if find_spec(f"hybridremat.{name}")] == []


@pytest.mark.everyday
def test_every_package_has_a_place_in_the_order():
    tops = {name.split(".")[0] for name, _, _ in sources()}
    tops |= {name.rpartition(".")[0] for name, _, _ in sources() if name.startswith("graph.")}
    assert tops == set(RANK)


@pytest.mark.everyday
def test_imports_run_one_way():
    trees = {name: (path, tree) for name, path, tree in sources()}
    offenders = []
    for name, (path, tree) in trees.items():
        for line, target in modules_read(name, tree, trees):
            here, there = room_of(name), room_of(target)
            if here != there and RANK[there] >= RANK[here]:
                offenders.append(f"{path}:{line} imports {target}")
    assert not offenders, "\n".join(offenders)


def test_no_files_import_in_a_circle():
    trees = {name: tree for name, _, tree in sources()}
    edges = [
        (name, target)
        for name, tree in trees.items()
        for _, target in modules_read(name, tree, trees)
        if target in trees
    ]
    groups = nx.strongly_connected_components(nx.DiGraph(edges))
    assert [sorted(group) for group in groups if len(group) > 1] == []


def test_blocks_and_sequence_never_name_torch():
    offenders = [
        f"{path}:{line} imports {full}"
        for name, path, tree in sources()
        if name.split(".")[0] in ("blocks", "sequence")
        for line, full in imported(tree)
        if full.split(".")[0] == "torch"
    ]
    assert not offenders, "\n".join(offenders)


def test_inductors_door_is_opened_by_those_who_ask(loaded):
    assert {"hybridremat.cli.main", "hybridremat.compiler.backend"} <= {*loaded["command"]}
    assert "hybridremat.graph.private_inductor" not in loaded["command"]


@pytest.mark.everyday
def test_private_torch_names_stand_behind_their_doors():
    offenders = set()
    for _, path, tree in sources():
        if path in PRIVATE_DOORS:
            continue
        uses = [*imported(tree)]
        uses += [(node.lineno, dotted(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        offenders |= {f"{path}:{line} uses {name}" for line, name in uses if is_private_torch(name)}
    assert not offenders, "\n".join(sorted(offenders))


def test_an_eager_step_loads_nothing_of_what_it_does_not_ask_for(loaded):
    rooms = "reports", "analysis", "planning.breaks", "sequence.checkmate", "graph.private_ind"
    rooms = *rooms, "planning.sized_capture", "planning.portfolio", "compiler.sections"
    ours = [name[12:] for name in loaded["step"] if name.startswith("hybridremat.")]
    assert [name for name in ours if name.startswith(rooms) or name == "compiler.units"] == []
    assert 0 < len(ours) <= 232

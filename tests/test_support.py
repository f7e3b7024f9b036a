"""What tests share stands in tests/support: no test module imports another."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
SUPPORT = TESTS / "support"


def imported(path: Path) -> set[str]:
    """Full names of everything that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_helpers_stand_in_support():
    found = {path for path in TESTS.rglob("*.py") if not path.name.startswith("test_")}
    assert {path for path in found if path.name != "conftest.py" and SUPPORT not in path.parents} == set()
    assert list(SUPPORT.rglob("test_*.py")) == []


def test_no_test_module_is_imported():
    modules = {path.stem for path in TESTS.rglob("*.py") if SUPPORT not in path.parents}
    offenders = [
        f"{path.relative_to(TESTS)} imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name in sorted(imported(path))
        if name.split(".")[0] in modules
    ]
    assert offenders == []

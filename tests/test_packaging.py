"""What is declared in pyproject.toml, against the folders and the pinned versions."""

import re
import tomllib
from pathlib import Path

import hybridremat
from hybridremat.reports.html_page import SCRIPTS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {
    "hybridremat": "hybridremat",
    "graph": "hybridremat.graph",
    "blocks": "hybridremat.blocks",
    "sequence": "hybridremat.sequence",
}


def test_every_folder_with_code_is_a_declared_package():
    found = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_package_has_an_init_file():
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_package_says_that_it_is_typed():
    assert [folder for folder in FOLDERS if not (ROOT / folder / "py.typed").exists()] == []


def test_the_reports_page_is_package_data():
    found = {path.name for path in (ROOT / "hybridremat" / "reports" / "page").iterdir()}
    assert found == {f"{name}.js" for name in SCRIPTS} | {
        "report.css",
        "report.html.jinja",
        "decisions.html.jinja",
        "steps.html.jinja",
    }
    assert "page/*" in PROJECT["tool"]["setuptools"]["package-data"]["hybridremat.reports"]


def test_nothing_is_named_tests_below_the_packages():
    # pytest would import such a file as part of a second, top-level package
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*test*.py")]
    assert found == []


def test_every_dependency_is_pinned():
    pinned = {
        _normal(line.split("==")[0])
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"].values()
    declared = [*PROJECT["project"]["dependencies"], *(name for extra in extras for name in extra)]
    needed = {_normal(re.split(r"[\[<>=!~; ]", name)[0]) for name in declared} - {"hybridremat"}
    assert needed - pinned == set()


def test_the_version_is_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{hybridremat.__version__}]" in changelog


def test_the_citation_is_of_this_version_and_its_day():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {hybridremat.__version__}\n" in citation
    day = re.search(r"^date-released: (.+)$", citation, re.MULTILINE)[1]
    assert f"## [{hybridremat.__version__}] - {day}\n" in changelog


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

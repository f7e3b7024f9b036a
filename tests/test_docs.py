"""Every example of the documentation runs, and prints what the page shows."""

import doctest
import importlib
import os
import pkgutil
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

import hybridremat
from hybridremat import errors
from hybridremat.planning import progress
from support import doc_examples

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
NAMES = [path.name for path in PAGES]

RUN = {"python", "console", "toml"}
SHOWN = {"text", "sh", "json"}  # output, commands of other programs, what files hold

# The examples that do not run here, by page and first line, each with its reason.
NOT_RUN: dict[tuple[str, str], str] = {}


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A current folder with the net of ``start.md``; what examples set is as before when they are over."""
    (tmp_path / "net.py").write_text(_net(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before, modules = dict(os.environ), set(sys.modules)
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        yield tmp_path
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def _net():
    page = (DOCS / "start.md").read_text(encoding="utf-8")
    return next(f[3] for f in doc_examples.FENCE.finditer(page) if f[3].startswith("# net.py\n"))


pytestmark = pytest.mark.full_effort  # pages show figures
QUICK = {"start.md", "read-a-plan.md"}
SLOW = {name: pytest.mark.slow for name in NAMES if name not in QUICK}


@pytest.mark.parametrize("path", [pytest.param(p, id=p.name, marks=SLOW.get(p.name, ())) for p in PAGES])
def test_examples_of_pages_run(path, own_folder, monkeypatch):
    monkeypatch.setattr(progress, "LONG", float("inf"))  # a line that a slow machine alone prints
    torch.manual_seed(0)
    doc_examples.run(doc_examples.parse(path))


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_every_block_is_an_example_or_says_that_it_is_none(path):
    # counted by the fences of the page alone, so that no block drops out of what the runner finds
    document = doc_examples.parse(path)
    starts = [example.region.start for example in document.examples()]
    left_out = {}
    for fence in doc_examples.FENCE.finditer(document.text):
        language = fence[2].strip()
        assert language in RUN | SHOWN or language.startswith("{"), f"{path.name}: ```{language}"
        found = any(fence.start() <= start < fence.end() for start in starts)
        assert found == (language in RUN), f"{path.name}: {fence[0][:80]}"
        reason = doc_examples.not_run(document.text, fence.start())
        if reason is not None:
            left_out[path.name, fence[3].split("\n")[0]] = reason
    assert left_out == {place: why for place, why in NOT_RUN.items() if place[0] == path.name}


def test_the_pages_have_their_examples():
    blocks = [
        fence[2].strip()
        for path in PAGES
        for fence in doc_examples.FENCE.finditer(path.read_text(encoding="utf-8"))
    ]
    # a lower number than before: say in the commit which examples went, and why
    assert blocks.count("python") >= 87
    assert blocks.count("console") >= 16


def _modules_with_examples():
    found = []
    for module in pkgutil.walk_packages(hybridremat.__path__, "hybridremat."):
        spec = importlib.util.find_spec(module.name)
        if ">>> " in Path(spec.origin).read_text(encoding="utf-8"):
            found.append(module.name)
    return found


def test_no_example_of_a_docstring_is_skipped():
    sources = [Path(importlib.util.find_spec(name).origin) for name in _modules_with_examples()]
    assert [path.name for path in sources if "+SKIP" in path.read_text(encoding="utf-8")] == []


@pytest.mark.slow
def test_examples_of_docstrings_run(own_folder):
    torch.manual_seed(0)
    net = importlib.import_module("net")
    tried = 0
    for name in _modules_with_examples():
        model, batch = net.make()
        known = {"hybridremat": hybridremat, "model": model, "batch": batch, "make": net.make}
        finder = doctest.DocTestFinder(exclude_empty=True)
        for test in finder.find(importlib.import_module(name), extraglobs=known):
            report = []
            runner = doctest.DocTestRunner(optionflags=doc_examples.FLAGS)
            runner.run(test, out=report.append)
            tried += len(test.examples)
            assert not runner.failures, "".join(report)
    assert tried


def test_every_error_and_warning_has_its_heading_in_troubleshooting():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    classes = {
        name
        for name, item in vars(errors).items()
        if isinstance(item, type) and issubclass(item, Exception) and item.__module__ == errors.__name__
    }
    headings = {line.removeprefix("### ").strip("`") for line in page if line.startswith("### ")}
    assert headings >= classes, f"no heading for {sorted(classes - headings)}"
    assert {name for name in headings if name.endswith(("Error", "Warning"))} <= classes


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    missing = [name for name in hybridremat.__all__ if f"hybridremat.{name}\n" not in page]
    assert missing == []


def test_links_of_the_readme_lead_somewhere():
    # those between pages are held by `make docs`
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#([\w-]+))?\)", text)
    assert len(links) > 10
    for path, heading in links:
        assert (ROOT / path).is_file(), path
        if heading:
            titles = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_table_of_contents():
    lines = (DOCS / "index.md").read_text(encoding="utf-8").splitlines()
    listed = {line.rpartition("<")[2].rstrip(">") for line in lines}
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert pages - listed == set()

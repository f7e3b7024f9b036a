"""Build the wheel, install it in a fresh environment and import every module from an empty folder.

An editable install hides what the wheel lacks: a subpackage that is missing from the package list, a
``py.typed`` that was not declared. The fresh environment holds nothing but the wheel; the dependencies
come from the environment that runs this script, through a ``.pth`` file, without its editable install.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "hybridremat": "hybridremat",
    "graph": "hybridremat/graph",
    "blocks": "hybridremat/blocks",
    "sequence": "hybridremat/sequence",
}
META = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")

IMPORT_ALL = """
import importlib, pathlib, sys
import hybridremat
home = pathlib.Path(hybridremat.__file__).parent
if not home.is_relative_to(sys.prefix):
    sys.exit(f"imported {home}, which is not the installed wheel")
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    if not pathlib.Path(module.__file__).is_relative_to(home):
        sys.exit(f"{name} came from {module.__file__}, not from the installed wheel")
import hybridremat.reports.html_page
hybridremat.reports.html_page.page_files()
missing = [name for name in hybridremat.__all__ if not hasattr(hybridremat, name)]
if missing:
    sys.exit(f"public names that cannot be loaded: {missing}")
"""


def copy_source(target: Path) -> Path:
    """Copy what a distribution is made of, so that the build leaves nothing in the checkout, nor finds it."""
    for name in (*PACKAGES, *META):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, target)
    (target / "tests").mkdir()
    (target / "tests" / "test_left_out.py").touch()  # setuptools would take it along
    return target


def expected_files() -> set[str]:
    """Paths that the wheel must hold: every module, each ``py.typed``, and the report's page."""
    files = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    pages = ROOT / "hybridremat" / "reports" / "page"
    page = {f"hybridremat/reports/page/{path.name}" for path in pages.iterdir()}
    return files | page | {f"{package}/py.typed" for package in PACKAGES.values()}


def check_content(wheel: Path) -> list[str]:
    """Return the module names that the wheel holds, or exit with what is wrong with its content."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    code = {name for name in names if ".dist-info/" not in name}
    wrong = [f"missing from the wheel: {name}" for name in sorted(expected_files() - code)]
    wrong += [f"should not be in the wheel: {name}" for name in sorted(code - expected_files())]
    if not any(name.endswith("licenses/LICENSE") for name in names):
        wrong.append("missing from the wheel: the licence")
    if wrong:
        sys.exit("\n".join(wrong))
    modules = (PurePosixPath(name).with_suffix("") for name in sorted(code) if name.endswith(".py"))
    return [".".join(path.parent.parts if path.name == "__init__" else path.parts) for path in modules]


def check_archive(archive: Path) -> None:
    """Exit if the source archive holds tests, caches, or no licence."""
    with tarfile.open(archive) as file:
        names = [PurePosixPath(name) for name in file.getnames()]
    wrong = [f"should not be in {archive.name}: {n}" for n in names if {"tests", "__pycache__"} & {*n.parts}]
    if not any(name.parts[1:] == ("LICENSE",) for name in names):
        wrong.append(f"missing from {archive.name}: the licence")
    if wrong:
        sys.exit("\n".join(wrong))


def install(wheel: Path, folder: Path) -> Path:
    """Install ``wheel`` alone into a new environment below ``folder`` and return its interpreter."""
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([python, "-c", query], text=True).strip())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    # A path added by a .pth file does not have its own .pth files read: the editable install stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def main() -> None:
    """Build, look inside, install, import."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = copy_source(folder / "source")
        # without --wheel the wheel is built from the source archive, so that one is checked too
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
        built = subprocess.run(build, check=False, capture_output=True, text=True)
        if built.returncode:
            sys.exit(built.stdout + built.stderr)
        (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
        check_archive(archive)
        modules = check_content(wheel)
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        python = install(wheel, folder)
        imported = subprocess.run([python, "-c", IMPORT_ALL, *modules], check=False, cwd=elsewhere)
        if imported.returncode:
            sys.exit("the installed wheel cannot be imported: see above")
        print(f"{wheel.name}: {len(modules)} modules import from the wheel alone")


if __name__ == "__main__":
    main()

"""Errors of the user's own code: told with file and line, without a traceback of ours."""

import sys
from pathlib import Path

import pytest

from hybridremat.cli import main as cli
from hybridremat.cli.targets import load_target
from hybridremat.errors import TargetError
from support.command_line import MODELS, failed


def line_of(text: str) -> int:
    return MODELS.splitlines().index(text) + 1


def told(capsys, target: str) -> str:
    return failed(capsys, "plan", target, "--limit", "50%")


def test_an_exception_in_the_function(models, capsys):
    line = line_of('    raise RuntimeError("mine")')
    place = f"{Path('mymodels.py').resolve()}:{line}"
    message = told(capsys, "mymodels.py:broken")
    assert message == f"hybridremat: mymodels.py:broken failed at {place}: RuntimeError: mine\n"
    assert message == told(capsys, "mymodels:broken").replace("mymodels:", "mymodels.py:")


def test_verbose_shows_the_traceback_of_the_user(models, capsys):
    assert cli.main(["plan", "mymodels.py:broken", "--limit", "50%", "-v"]) == 2
    err = capsys.readouterr().err
    assert 'raise RuntimeError("mine")' in err
    assert err.index("RuntimeError: mine") < err.index("TargetError")


def test_an_error_inside_a_library_names_the_users_line(models, capsys):
    Path("calls.py").write_text("import json\n\ndef make():\n    return json.loads('{')\n")
    assert "calls.py:4: JSONDecodeError" in told(capsys, "calls.py:make")


def test_a_program_that_ends_itself(models, capsys):
    assert "ended the program (exit status 3)" in told(capsys, "mymodels.py:ended")
    Path("script.py").write_text("import sys\n\nsys.exit('done')\n")
    message = told(capsys, "script.py:make")
    assert 'script.py:3: put what a script does below `if __name__ == "__main__":`' in message


@pytest.mark.parametrize("target", ["odd.py:make", "odd:make"])
def test_a_syntax_error_in_the_file(models, capsys, target):
    Path("odd.py").write_text("x = 1\ndef make(:\n")
    assert "odd.py:2: invalid syntax" in told(capsys, target)
    assert "odd" not in sys.modules or target.endswith(".py:make")


@pytest.mark.parametrize("target", ["needy.py:make", "needy:make"])
def test_a_missing_import_in_the_file(models, capsys, target):
    Path("needy.py").write_text("\nimport no_such_module_here.below\n")
    message = told(capsys, target)
    assert "needy.py:2: ModuleNotFoundError: No module named 'no_such_module_here'" in message
    assert "Install no_such_module_here in this environment" in message
    sys.modules.pop("needy", None)


def test_a_module_that_lacks_something_is_not_called_missing(models):
    Path("needy.py").write_text("import no_such_module_here\n")
    with pytest.raises(TargetError, match="importing needy failed"):
        load_target("needy:make")
    with pytest.raises(TargetError, match="there is no module 'needy2'"):
        load_target("needy2:make")


def test_an_error_in_the_models_forward(models, capsys):
    Path("bad.py").write_text(
        "from mymodels import make as made\n\ndef make():\n    model, batch = made()\n"
        "    return model, {**batch, 'x': batch['x'][:, :3]}\n"
    )
    assert "Net fails on these inputs" in told(capsys, "bad.py:make")

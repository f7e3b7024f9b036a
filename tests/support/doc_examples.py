"""The examples of a page, found and run: Python blocks in one namespace, commands in one folder.

- A ``python`` block runs; one with ``>>>`` is compared with the output that it shows.
- A ``python`` block whose first line is ``# train.py`` is that file, too; a ``toml`` block is nothing else.
- ``<!-- invisible-code-block: python … -->`` runs and is not seen.
- A ``console`` block runs each ``$ hybridremat …``, and compares what it prints with what is shown, if
  anything is; ``...`` stands for any text. A command must succeed unless ``$ echo $?`` comes next.
- ``<!-- not run: reason -->`` ahead of a block leaves it out (see ``NOT_RUN`` in ``test_docs.py``).
"""

from __future__ import annotations

import doctest
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from hybridremat.cli import main as cli

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- not run: ([^\n]*) -->\s*\Z")
FILE_NAME = re.compile(r"# ([\w.]+\.\w+)\n")


class Console:
    """Runs commands in this process, as a shell in the current folder would."""

    def __init__(self) -> None:
        self.status = 0

    def __call__(self, example: Example) -> str | None:
        commands = re.split(r"^\$ ", str(example.parsed), flags=re.MULTILINE)
        if commands[0].strip():
            return "a console block starts with a command: $ hybridremat …"
        for place, text in enumerate(commands[1:], start=2):
            command, _, expected = text.partition("\n")
            printed = self._run(command)
            tolerated = place < len(commands) and commands[place].startswith("echo $?")
            if self.status and not tolerated:
                return f"$ {command} ended with {self.status}:\n{printed}"
            if expected.strip() and not doctest.OutputChecker().check_output(expected, printed, FLAGS):
                return f"$ {command}\nexpected:\n{expected}\nprinted:\n{printed}"
        return None

    def _run(self, command: str) -> str:
        if command == "echo $?":
            status, self.status = self.status, 0
            return f"{status}\n"
        name, *arguments = shlex.split(command, comments=True)
        if name != "hybridremat":
            raise ValueError(f"only hybridremat is run, not {command!r}")
        out = StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            try:
                self.status = cli.main(arguments)
            except SystemExit as stop:
                self.status = stop.code if isinstance(stop.code, int) else 1
        return out.getvalue()


def parse(path: Path) -> Document:
    """The examples of a page, with an empty namespace."""
    python = PythonCodeBlockParser(doctest_optionflags=FLAGS)
    files = CodeBlockParser("toml", lambda _: None)
    return Document.parse(str(path), python, CodeBlockParser("console", Console()), files)


def run(document: Document) -> None:
    """Run all examples in the current folder, hidden ones too, but those that are marked."""
    for example in document.examples():
        if not_run(document.text, example.region.start) is None:
            _write_file(example)
            try:
                example.evaluate()
            except Exception as error:
                error.add_note(f"in the example at {document.path}:{example.line}")
                raise


def not_run(text: str, start: int) -> str | None:
    """The reason why the block that starts at this place is not run, if it is marked."""
    mark = MARK.search(text[:start])
    return None if mark is None else mark[1]


def _write_file(example: Example) -> None:
    named = FILE_NAME.match(str(example.parsed)) if isinstance(example.parsed, str) else None
    if named:
        Path(named[1]).write_text(str(example.parsed), encoding="utf-8")

"""Files appear complete or not at all; what is there and is no file stays what it is."""

import os
import threading

import pytest

from hybridremat import Plan
from hybridremat.cli import main as cli
from hybridremat.cli.output import require_writable
from hybridremat.errors import OutputError
from hybridremat.files import write_atomic
from support.command_line import QUICK


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def read_in_background(path):
    """What is read from a pipe, once the thread has ended."""
    found = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    reader.start()
    return reader, found


def test_a_pipe_is_written_to_and_stays_a_pipe(pipe):
    reader, found = read_in_background(pipe)
    write_atomic(pipe, "text")
    reader.join(10)
    assert found == [b"text"]
    assert pipe.is_fifo()
    assert [path.name for path in pipe.parent.iterdir()] == ["pipe"]


def test_a_command_writes_to_a_pipe(models, pipe):
    """``-o /dev/stdout`` and ``-o /dev/null`` are of this kind: as root a rename would replace the device."""
    reader, found = read_in_background(pipe)
    assert cli.main(["plan", f"{models}:make", "--limit", "99%", "-o", str(pipe), *QUICK]) == 0
    reader.join(10)
    assert pipe.is_fifo()
    copy = pipe.with_name("copy.json")
    copy.write_bytes(found[0])
    assert Plan.load(copy).memory_limit > 0


def test_a_link_stays_and_its_file_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    link, file = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to(file)
    for text in ("new", "newer"):
        write_atomic(link, text)
        assert link.is_symlink()
        assert file.read_text() == text
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_a_link_into_no_folder_is_told_beforehand(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "missing" / "file")
    with pytest.raises(OutputError, match=r"there is no folder .*missing; make it first"):
        require_writable(str(link))


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "kept.txt"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]

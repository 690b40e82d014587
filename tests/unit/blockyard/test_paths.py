"""Paths that come from outside: bounded as texts, found below a root, and opened without waiting."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from blockyard import paths
from blockyard.errors import BlockyardError, Reason
from blockyard.paths import find_below, open_file, read_file, wrong_name, wrong_path
from tests.kit.hostile_paths import ALWAYS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("path", ["a", "a/b", "/", "ä" * 127, "a/" * 512, "~x", "a b\n"])
def test_what_a_system_takes_for_a_path_is_one(path: str) -> None:
    assert wrong_path(path) == ""


@pytest.mark.parametrize("path", ["", "ä" * 128, "a/" * 512 + "a", "\ud800", *ALWAYS.values()])
def test_what_no_system_takes_is_none(path: str) -> None:
    assert wrong_path(path).startswith("must ")


def test_names_have_a_length() -> None:
    assert [bool(wrong_name("x" * number)) for number in (0, 1, 256, 257)] == [True, False, False, True]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root behind a link, with a file of its own and links to others."""
    for name, content in (("root/a/own", "own"), ("root/b/other", "other"), ("outside/secret", "secret")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "root/a/link").symlink_to("../b/other")
    (tmp_path / "root/a/leads-out").symlink_to("../../outside/secret")
    (tmp_path / "root/a/folder").symlink_to("../../outside")
    (tmp_path / "root/a/back").symlink_to("../../outside/../root/b/other")
    (tmp_path / "link-to-root").symlink_to("root")
    return tmp_path / "link-to-root"


def test_the_file_that_is_opened_lies_below_the_root(root: Path) -> None:
    _look(root)


def test_without_proc_the_path_is_resolved_instead(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def readlink(path: str) -> str:
        if path.startswith("/proc"):
            raise FileNotFoundError(path)
        return real(path)

    real = os.readlink
    monkeypatch.setattr(os, "readlink", readlink)
    _look(root)


def _look(root: Path) -> None:
    for name, content in (("own", b"own"), ("link", b"other"), ("back", b"other")):
        assert read_file(root / "a" / name, root) == content
    for name in ("leads-out", "folder/secret", "../../outside/secret"):
        with pytest.raises(PermissionError, match="a link leads out of"):
            open_file(root / "a" / name, root)
        # Without a root anything may be read.
        assert read_file(root / "a" / name) == b"secret"


def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        # A socket's path must be short.
        monkeypatch.chdir(tmp_path)
        listener.bind("socket")
        for name in ("pipe", "link", "folder", "socket", "/dev/zero"):
            with pytest.raises(OSError, match="it is no regular file"):
                open_file(tmp_path / name)
    with pytest.raises(OSError, match="NUL"):
        open_file(tmp_path / "a\0b")


def test_one_that_is_exchanged_before_it_is_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags: real(tmp_path / "pipe", flags))
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="it is no regular file"):
        open_file(tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MAX_WHOLE_FILE_BYTES", 3)
    (tmp_path / "file").write_text("abc")
    assert read_file(tmp_path / "file") == b"abc"
    (tmp_path / "file").write_text("abcd")
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_file(tmp_path / "file")


def test_a_folder_is_found_below_the_root(root: Path) -> None:
    assert find_below(root, "a", "path", "--root") == find_below(root, str(root / "a"), "path", "--root")
    for path, reason in (
        ("a/folder", Reason.PERMISSION_DENIED),
        ("..", Reason.PERMISSION_DENIED),
        ("a/own", Reason.MODEL_NOT_LOADED),
        ("x" * 255 + "/" + "x" * 255, Reason.MODEL_NOT_LOADED),
        ("x" * 256, Reason.FIELD_INVALID),
    ):
        with pytest.raises(BlockyardError) as raised:
            find_below(root, path, "path", "--root")
        assert raised.value.reason is reason

"""Where a worker's unix socket lies: private, short, swept after its owner's death, and trusted only if it is reached."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.barriers.messages import SOCKET_PATH_BYTES_MAX
from holdfast.barriers.transport.socketfolder import (
    SocketFolder,
    is_private,
    is_reachable,
    make_socket_folder,
    sweep_socket_folders,
)


@pytest.fixture
def short() -> Iterator[Path]:
    """pytest's own folders have long paths."""
    path = Path(tempfile.mkdtemp(prefix="hs-"))
    yield path
    shutil.rmtree(path)


def listening(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    return server


def made(parent: Path) -> SocketFolder:
    folder = make_socket_folder(str(parent))
    assert folder is not None
    return folder


def test_it_lies_in_the_workers_own_folder_and_is_for_its_user_alone(short: Path) -> None:
    folder = made(short)
    assert os.path.dirname(folder.path) == str(short)
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    folder.delete()
    folder.delete()
    assert list(short.iterdir()) == []


def test_a_long_path_moves_it_to_the_temporary_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    folder = made(deep)
    assert len(os.fsencode(folder.socket)) <= SOCKET_PATH_BYTES_MAX
    assert list(deep.iterdir()) == []
    folder.delete()


def test_a_folder_that_others_may_write_to_is_no_place(short: Path) -> None:
    short.chmod(0o777)
    folder = made(short)
    assert os.path.dirname(folder.path) != str(short)
    assert list(short.iterdir()) == []
    folder.delete()


def test_no_place_at_all_means_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "mkdir", fails)
    assert make_socket_folder(str(tmp_path)) is None


@pytest.mark.parametrize("call", ["fcntl.flock", "is_private"])
def test_a_file_system_that_refuses_a_call_keeps_neither_folder_nor_descriptor(
    short: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """NFS without locks, say."""

    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(f"holdfast.barriers.transport.socketfolder.{call}", fails)
    assert make_socket_folder(str(short)) is None
    monkeypatch.undo()
    assert list(short.iterdir()) == []
    held = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in held if path.startswith(f"{short}/")]


def test_what_a_dead_worker_left_is_swept_and_what_a_living_one_holds_is_not(short: Path) -> None:
    alive, dead = made(short), made(short)
    os.close(dead._descriptor)  # as the system does at its death
    dead._descriptor = -1
    (short / "hf-not-one-of-ours").mkdir()
    sweep_socket_folders(str(short))
    assert {path.name for path in short.iterdir()} == {os.path.basename(alive.path), "hf-not-one-of-ours"}
    alive.delete()
    sweep_socket_folders(str(short / "nowhere"))


def test_a_link_is_not_followed_by_the_sweep(short: Path) -> None:
    (short / "precious").mkdir()
    (short / "hf-0123456789abcdef").symlink_to(short / "precious")
    sweep_socket_folders(str(short))
    assert (short / "precious").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_neither_swept_nor_private(short: Path) -> None:
    other = short / "hf-0123456789abcdef"
    other.mkdir(mode=0o700)
    os.chown(other, 65_534, 65_534)
    sweep_socket_folders(str(short))
    assert other.exists()
    assert not is_private(str(other))
    os.chown(other, 0, 0)
    assert is_private(str(other))
    os.chown(short, 65_534, 65_534)
    assert not is_private(str(other))


def test_private_means_private_all_the_way_up(short: Path) -> None:
    folder = short / "own"
    folder.mkdir(mode=0o700)
    assert is_private(str(folder))
    short.chmod(0o777)
    assert not is_private(str(folder))
    short.chmod(0o1777)
    assert is_private(str(folder))
    folder.chmod(0o750)
    assert not is_private(str(folder))
    assert not is_private(str(short / "nowhere"))


def test_a_socket_counts_only_if_somebody_of_this_user_listens(short: Path) -> None:
    folder = made(short)
    assert not is_reachable(folder.socket)
    server = listening(folder.socket)
    assert is_reachable(folder.socket)
    server.close()
    assert not is_reachable(folder.socket)  # the file of a dead worker
    folder.delete()


def test_paths_that_mean_nothing_are_not_reached(short: Path) -> None:
    for path in ("", "d", "/" + "x" * SOCKET_PATH_BYTES_MAX, "/nowhere/d", str(short), "/\0"):
        assert not is_reachable(path)


def test_a_socket_in_a_folder_of_others_is_not_reached(short: Path) -> None:
    folder = short / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with listening(str(folder / "d")):
        assert not is_reachable(str(folder / "d"))

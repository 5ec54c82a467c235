"""Who may read what: state is its owner's or a shared group's, output is for whom the umask lets in."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.operators.sinks.files.log import SinkSettings
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.permissions import SHARED


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=lambda mask: f"umask-{mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """What a user may have set; it is the same afterwards."""
    mask: int = request.param
    before = os.umask(mask)
    yield mask
    assert os.umask(before) == mask


def modes(root: Path) -> dict[str, int]:
    """Mode of the root and of everything below it."""
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}


def write_all_kinds(storage: ops.Storage, scratch: Path) -> None:
    (scratch / "local").write_bytes(b"x")
    storage.execute(ops.PutIfAbsent("job/chk-1/_metadata", b"{}"))
    storage.execute(ops.WriteFile("job/chk-1/a", [b"x"]))
    storage.execute(ops.UploadFile(str(scratch / "local"), "job/chk-1/b"))
    storage.execute(ops.LinkFile("job/chk-1/a", "job/shared/a"))


def kinds(found: dict[str, int], root: Path) -> tuple[set[int], set[int]]:
    """Modes of folders, of files."""
    folders = {mode for path, mode in found.items() if (root / path).is_dir()}
    return folders, {mode for path, mode in found.items() if (root / path).is_file()}


@pytest.mark.parametrize("exists", [False, True], ids=["new", "there"])
def test_state_is_its_owners_alone(tmp_path: Path, umask: int, exists: bool) -> None:
    root = tmp_path / "state"
    if exists:
        root.mkdir(mode=0o755)
    write_all_kinds(open_storage(str(root)), tmp_path)
    found = modes(root)
    if exists:
        assert found.pop(".") == 0o755 & ~umask  # its maker's affair
    assert kinds(found, root) == ({0o700}, {0o600})


def test_a_group_shares_a_directory_that_says_so_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    root = tmp_path / "state"
    root.mkdir()
    root.chmod(0o2770)
    write_all_kinds(open_storage(str(root)), tmp_path)
    assert kinds(modes(root), root) == ({0o2770}, {0o660})


@pytest.mark.parametrize("put", ["link", "folder"])
def test_what_one_of_the_group_puts_in_a_new_folders_place_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: str
) -> None:
    precious, path = tmp_path / "precious", tmp_path / "new"
    precious.mkdir(mode=0o700)
    if put == "folder":
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)  # whose is not what is found

    def mkdir(name: str, mode: int) -> None:
        if put == "link":
            path.symlink_to(precious)
        else:
            precious.rename(name)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises((NotADirectoryError, PermissionError)):
        SHARED.make_folder(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_directory_that_others_may_merely_enter_is_not_shared(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir()
    root.chmod(0o2750)
    open_storage(str(root)).execute(ops.WriteFile("a", [b"x"]))
    assert modes(root)["a"] == 0o600


def test_savepoints_elsewhere_are_as_private_and_as_shared_as_the_state(tmp_path: Path) -> None:
    private, shared = tmp_path / "private", tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2770)
    for root, (folder, file) in {private: (0o700, 0o600), shared: (0o2770, 0o660)}.items():
        target = tmp_path / f"savepoints-{root.name}"
        write_all_kinds(open_storage(str(root)).at(str(target)), tmp_path)
        assert kinds(modes(target), target) == ({folder}, {file})
    write_all_kinds(open_storage(str(private)).at(str(shared)), tmp_path)
    assert kinds(modes(shared), shared) == ({0o2770}, {0o660})


@pytest.mark.parametrize("beside", [None, "state"], ids=["driver", "worker"])
def test_output_is_read_by_whom_the_umask_lets_in(tmp_path: Path, umask: int, beside: str | None) -> None:
    state = None if beside is None else open_storage(str(tmp_path / beside))
    root = tmp_path / "output"
    write_all_kinds(SinkSettings(str(root), "sink", 1 << 20).storage(state), tmp_path)
    assert kinds(modes(root), root) == ({0o777 & ~umask}, {0o666 & ~umask})


def test_what_a_restore_copies_to_a_worker_is_private(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "state")
    storage.execute(ops.WriteFile("a", [b"x"]))
    storage.execute(ops.DownloadFile("a", str(tmp_path / "copy")))
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o600

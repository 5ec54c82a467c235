"""Whose folder it is: a living process's stays, however still it stands, and a dead one's goes, and nothing else does."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.operators.spark import shipping
from holdfast.operators.spark import slots as spark_task
from holdfast.operators.worker.working_folders import BEGUN_AGE_S, BEGUN_SUFFIX, WORKER_FOLDER, FolderSweep, OwnedFolder
from tests.harness.disks import NOBODY, needs_root

NAME = "job-0-1-{:016x}"
ROOT = Path(__file__).resolve().parents[3]

OWNER = """
import sys, time
from holdfast.operators.worker.working_folders import OwnedFolder
folder = OwnedFolder(sys.argv[1], sys.argv[2])
open(folder.path + "/content", "w").close()
print("owned", flush=True)
time.sleep(600)
"""


def sweep(root: Path) -> int:
    sweep = FolderSweep(str(root), WORKER_FOLDER)
    while sweep.step():
        pass
    return sweep.swept


def left_behind(root: Path, number: int) -> Path:
    """By a process that died with a database in it."""
    folder = OwnedFolder(str(root), NAME.format(number))
    database = Path(folder.path, "count-0-1-n1", "db")
    database.mkdir(parents=True)
    (database / "000008.sst").write_bytes(b"x" * 1000)
    folder.close()
    return Path(folder.path)


@contextmanager
def owner_process(root: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(root), name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def test_what_the_dead_left_goes_and_what_the_living_have_stays(tmp_path: Path) -> None:
    dead = [left_behind(tmp_path, number) for number in range(5)]
    alive = OwnedFolder(str(tmp_path), NAME.format(9))
    assert sweep(tmp_path) == 5
    assert not any(folder.exists() for folder in dead)
    assert os.listdir(tmp_path) == [NAME.format(9)]
    alive.delete()
    assert os.listdir(tmp_path) == []


def test_a_process_owns_its_folder_until_it_is_killed_also_while_it_stands_still(tmp_path: Path) -> None:
    with owner_process(tmp_path, NAME.format(1)) as process:
        assert sweep(tmp_path) == 0
        process.send_signal(signal.SIGSTOP)
        assert sweep(tmp_path) == 0
        assert (tmp_path / NAME.format(1) / "content").exists()
        process.kill()
        process.wait()
        assert sweep(tmp_path) == 1
    assert os.listdir(tmp_path) == []


def test_a_folder_is_deleted_a_step_at_a_time_and_what_was_deleted_by_half_is_deleted_again(tmp_path: Path) -> None:
    for number in range(3):
        left_behind(tmp_path, number)
    first = FolderSweep(str(tmp_path), WORKER_FOLDER)
    assert first.step()
    assert len(os.listdir(tmp_path)) == 2
    half = tmp_path / sorted(os.listdir(tmp_path))[0]
    (half / "count-0-1-n1" / "db" / "000008.sst").unlink()
    empty = tmp_path / NAME.format(7)
    empty.mkdir()  # its lock was deleted, and then its deleter died
    assert sweep(tmp_path) == 3
    assert not first.step(), "somebody else was there first"


def test_two_that_sweep_at_one_time_delete_each_folder_once(tmp_path: Path) -> None:
    for number in range(6):
        left_behind(tmp_path, number)
    sweeps = [FolderSweep(str(tmp_path), WORKER_FOLDER) for _ in range(2)]
    while sum(each.step() for each in sweeps):
        pass
    assert sum(each.swept for each in sweeps) == 6
    assert os.listdir(tmp_path) == []


def test_foreign_names_copies_links_and_unlocked_folders_stay(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    left_behind(outside, 1)
    root = tmp_path / "root"
    root.mkdir()
    copies = root / "recovery" / "0123-job" / "1-v-0-n"
    copies.mkdir(parents=True)
    (copies / "lock").touch()
    for name in ("somebody-else", "job-0-1-xyz", "holdfast-workers"):
        (root / name).mkdir()
        (root / name / "lock").touch()
    (root / NAME.format(1)).symlink_to(outside / NAME.format(1))
    unlocked = root / NAME.format(2)
    (unlocked / "db").mkdir(parents=True)  # of a file system without locks, or of another version of ours
    for number, make in ((3, lambda path: os.mkfifo(path)), (4, lambda path: path.symlink_to("/etc/hostname"))):
        (root / NAME.format(number)).mkdir()
        make(root / NAME.format(number) / "lock")
        (root / NAME.format(number) / "kept").touch()
    before = sorted(os.listdir(root))
    assert sweep(root) == 0
    assert sorted(os.listdir(root)) == before
    assert (outside / NAME.format(1) / "lock").exists()
    assert (copies / "lock").exists()


def test_links_in_a_dead_folder_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    folder = left_behind(tmp_path / "root", 1)
    (folder / "link").symlink_to(tmp_path / "precious")
    (folder / "count-0-1-n1" / "link").symlink_to(tmp_path / "precious")
    assert sweep(tmp_path / "root") == 1
    assert (tmp_path / "precious" / "file").exists()


@needs_root
def test_what_another_user_left_is_his(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, 1)
    os.chown(folder, NOBODY, NOBODY)
    assert sweep(tmp_path) == 0
    assert folder.exists()


def test_who_died_while_it_made_its_folder_is_remembered_for_an_hour(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, 1)
    begun = folder.rename(f"{folder}{BEGUN_SUFFIX}")
    assert sweep(tmp_path) == 0
    os.utime(begun, (0, os.stat(begun).st_mtime - BEGUN_AGE_S - 60))
    assert sweep(tmp_path) == 1


def test_a_folder_that_can_not_be_locked_is_used_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as without:
        without.setattr(fcntl, "flock", refuse)
        folder = OwnedFolder(str(tmp_path), NAME.format(1))
    Path(folder.path, "content").touch()
    assert sweep(tmp_path) == 0
    folder.delete()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_can_not_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "rename", refuse)
        with pytest.raises(OSError, match="No space left"):
            OwnedFolder(str(tmp_path), NAME.format(1))
    assert os.listdir(tmp_path) == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files, on an executor that has no other."""
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_spark_folders_the_root_is_one_of_the_user_alone(temporary: Path) -> None:
    root = Path(spark_task.local_directory())
    assert root == temporary / f"holdfast-workers-{os.geteuid()}"
    assert root.stat().st_mode & 0o777 == 0o700
    left_behind(root, 1)
    assert sweep(Path(spark_task.local_directory())) == 1


@pytest.mark.parametrize("taken", ["file", "link", "open", pytest.param("another's", marks=needs_root)])
def test_a_root_that_somebody_took_is_neither_used_nor_in_the_way(temporary: Path, taken: str) -> None:
    theirs, elsewhere = temporary / f"holdfast-workers-{os.geteuid()}", temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if taken == "file":
        theirs.touch()
    elif taken == "link":
        theirs.symlink_to(elsewhere)
    else:
        theirs.mkdir()
        theirs.chmod(0o777 if taken == "open" else 0o700)
        if taken == "another's":
            os.chown(theirs, NOBODY, NOBODY)
    (temporary / f"{theirs.name}-0").symlink_to(elsewhere)
    root = Path(spark_task.local_directory())
    assert root not in (theirs, temporary / f"{theirs.name}-0")
    assert root.stat().st_mode & 0o777 == 0o700
    left_behind(root, 1)
    assert sweep(Path(spark_task.local_directory())) == 1  # whoever comes next has the same
    assert list(elsewhere.iterdir()) == []


def test_a_root_that_is_missing_has_nothing_to_sweep(tmp_path: Path) -> None:
    assert sweep(tmp_path / "nowhere") == 0


def test_a_driver_has_one_package_folder_and_deletes_those_of_killed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with owner_process(tmp_path, "holdfast-package-0000000000000001") as killed:
        killed.kill()
        killed.wait()
        with owner_process(tmp_path, "holdfast-package-0000000000000002"):
            (tmp_path / "holdfast-package-mine").mkdir()  # no name of ours
            shipping._package_folder.cache_clear()
            folders = {shipping._package_folder(os.getpid()) for _ in range(3)}
            assert len(folders) == 1, "submissions of one process share it"
            assert {path.name for path in tmp_path.iterdir()} == {
                "holdfast-package-0000000000000002",
                "holdfast-package-mine",
                *(path.name for path in folders),
            }
    shipping._package_folder.cache_clear()

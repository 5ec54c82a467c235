"""The simulated disk: names and errors as the real file system has them, and what a loss of power may take."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos.sim.disk import SimDisk
from holdfast.statebackends.errors import InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.filesystem import FileSystem, OsFileSystem
from holdfast.statebackends.storage.port import Storage
from tests.statebackends.storage_contract import DATA, PATH, StorageContract


class TestContract(StorageContract):
    """The product's directory storage on the simulated disk."""

    @pytest.fixture
    def storage(self) -> Storage:
        return SimDisk().storage("/state")


def write(disk: FileSystem, path: str, data: bytes, *, sync: bool) -> None:
    descriptor = disk.create(path)
    assert disk.write(descriptor, data) == len(data)
    if sync:
        disk.fsync(descriptor)
    disk.close(descriptor)


def read(disk: FileSystem, path: str) -> bytes:
    descriptor = disk.open(path)
    try:
        return disk.read(descriptor, 1 << 20, 0)
    finally:
        disk.close(descriptor)


def survivors(prepare: Callable[[SimDisk], None], runs: int = 60) -> list[dict[str, bytes]]:
    """What may be left after a loss of power, without repetitions."""
    found: dict[str, dict[str, bytes]] = {}
    for seed in range(runs):
        disk = SimDisk()
        prepare(disk)
        disk.power_loss(random.Random(seed))
        view = disk.view("/")
        left = {path: view.peek(path) or b"" for path in view.paths()}
        found[repr(left)] = left
    return sorted(found.values(), key=lambda left: sorted(left.items()))


# ----------------------------------------------------------------------------------------------------------- like the real one


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


NAMES = ("a", "b", "a/a", "a/b", "b/a", "a/a/a", "a/b/a")


def one_call(rng: random.Random, disk: FileSystem, root: str) -> Any:
    path, other = f"{root}/{rng.choice(NAMES)}", f"{root}/{rng.choice(NAMES)}"
    name = rng.choice(("create", "create", "read", "link", "unlink", "mkdir", "mkdir", "rmdir", "stat", "list", "fsync_folder"))
    data = bytes([rng.randrange(256)]) * rng.randrange(5)
    match name:
        case "create":
            return name, path, outcome(lambda: write(disk, path, data, sync=bool(data)))
        case "read":
            found = outcome(lambda: disk.stat(path).is_folder)
            return name, path, outcome(lambda: read(disk, path)) if found is not True else None
        case "link":
            return name, path, other, outcome(lambda: disk.link(path, other))
        case "stat":
            found = outcome(lambda: disk.stat(path))
            return name, path, found if isinstance(found, str) else (found.is_folder or found.size, found.is_folder)
        case "list":
            found = outcome(lambda: disk.list_folder(path))
            return name, path, found if isinstance(found, str) else sorted(found)
        case _:
            return name, path, outcome(lambda: getattr(disk, name)(path))


@pytest.mark.parametrize("seed", range(8))
def test_every_call_answers_as_the_real_file_system_does(tmp_path: Path, seed: int) -> None:
    simulated = SimDisk()
    simulated.mkdir("/root")
    ours, real = random.Random(seed), random.Random(seed)
    for _ in range(400):
        answer = one_call(ours, simulated, "/root")
        expected = one_call(real, OsFileSystem(), str(tmp_path))
        assert [str(part).removeprefix("/root") for part in answer] == [str(part).removeprefix(str(tmp_path)) for part in expected]


def test_two_names_are_one_file() -> None:
    disk = SimDisk()
    write(disk, "/a", DATA, sync=True)
    disk.link("/a", "/b")
    write(disk, "/c", DATA, sync=True)
    assert disk.stat("/a").inode == disk.stat("/b").inode != disk.stat("/c").inode
    disk.unlink("/a")
    assert read(disk, "/b") == DATA


def test_times_are_those_of_the_given_clock() -> None:
    now = [1_000]
    disk = SimDisk(lambda: now[0])
    descriptor = disk.create("/a")
    assert disk.stat("/a").modified_ms == 1_000
    now[0] = 2_000
    disk.write(descriptor, DATA)
    assert disk.stat("/a").modified_ms == 2_000


# ------------------------------------------------------------------------------------------------------------ loss of power


def test_synced_content_under_a_synced_name_stays() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.mkdir("/folder")
        disk.fsync_folder("/")
        write(disk, "/folder/a", DATA, sync=True)
        disk.fsync_folder("/folder")

    assert survivors(prepare) == [{"folder/a": DATA}]


def test_an_unsynced_name_may_vanish_and_takes_all_below_it_along() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.mkdir("/folder")
        write(disk, "/folder/a", DATA, sync=True)
        disk.fsync_folder("/folder")

    assert survivors(prepare) == [{}, {"folder/a": DATA}]


def test_unsynced_content_tears() -> None:
    def prepare(disk: SimDisk) -> None:
        write(disk, "/a", b"xyz", sync=False)
        disk.fsync_folder("/")

    found = [left["a"] for left in survivors(prepare, 200)]
    assert set(found) == {b"", b"x", b"xy", b"xyz", b"x\0\0", b"xy\0", b"\0\0\0"}


def test_what_was_written_before_the_last_sync_stays_whole() -> None:
    def prepare(disk: SimDisk) -> None:
        descriptor = disk.create("/a")
        disk.write(descriptor, b"safe")
        disk.fsync(descriptor)
        disk.write(descriptor, b"lost")
        disk.fsync_folder("/")

    found = [left["a"] for left in survivors(prepare)]
    assert len(found) > 4
    assert all(content.startswith(b"safe") for content in found)


def test_an_unsynced_deletion_may_come_undone() -> None:
    def prepare(disk: SimDisk) -> None:
        for name in ("a", "b"):
            write(disk, f"/{name}", DATA, sync=True)
        disk.fsync_folder("/")
        disk.unlink("/a")
        disk.unlink("/b")
        write(disk, "/b", b"new", sync=True)

    assert survivors(prepare) == [{"a": DATA, "b": b"new"}, {"a": DATA, "b": DATA}, {"b": b"new"}, {"b": DATA}]


def test_a_folder_that_comes_back_has_what_its_own_names_say() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.mkdir("/folder")
        disk.fsync_folder("/")
        write(disk, "/folder/a", DATA, sync=True)
        disk.fsync_folder("/folder")
        disk.unlink("/folder/a")
        disk.fsync_folder("/folder")
        disk.rmdir("/folder")

    assert survivors(prepare) == [{}]
    disk = SimDisk()
    prepare(disk)
    disk.power_loss(random.Random(0))
    assert outcome(lambda: disk.list_folder("/folder")) in ([], "ENOENT")


def test_the_same_seed_loses_the_same() -> None:
    def left(seed: int) -> list[tuple[str, bytes | None]]:
        disk = SimDisk()
        for number in range(40):
            write(disk, f"/{number}", bytes(number), sync=number % 3 == 0)
        disk.power_loss(random.Random(seed))
        view = disk.view("/")
        return [(path, view.peek(path)) for path in view.paths()]

    assert left(1) == left(1) != left(2)


def test_after_a_loss_of_power_nothing_is_open_and_the_disk_works_again() -> None:
    disk = SimDisk()
    storage, view = disk.storage("/state"), disk.view("/state")
    storage.execute(ops.PutIfAbsent(PATH, DATA))
    descriptor = disk.create("/left")
    disk.power_loss(random.Random(1))
    assert outcome(lambda: disk.write(descriptor, DATA)) == "EBADF"
    disk.close(descriptor)
    assert disk.power_losses == 1
    assert storage.execute(ops.PutIfAbsent(PATH, b"other")) is False
    assert storage.execute(ops.PutIfAbsent(f"{PATH}2", b"other")) is True
    assert [view.peek(path) for path in view.paths()] == [DATA, b"other"]


# --------------------------------------------------------------------------------------------------------------- the hook


def test_the_hook_sees_each_call_and_can_cut_a_write_short() -> None:
    seen: list[str] = []

    def hook(name: str, path: str, size: int) -> int:
        seen.append(f"{name} {path} {size}" if size else f"{name} {path}")
        return min(size, 8)

    disk = SimDisk(before_call=hook)
    disk.mkdir("/state")
    assert disk.storage("/state").execute(ops.WriteFile("a", [DATA])) == len(DATA)
    assert seen == [
        "mkdir /state",
        "mkdir /state",
        "fsync_folder /",
        "mkdir /state/.tmp",
        "fsync_folder /state",
        "create /state/.tmp/00000001",
        "write /state/.tmp/00000001 12",
        "write /state/.tmp/00000001 4",
        "fsync /state/.tmp/00000001",
        "stat /state/.tmp/00000001",  # the first write of a process looks for what others left long ago
        "list_folder /state/.tmp",
        "stat /state/.tmp/00000001",
        "link /state/a",
        "fsync_folder /state",
        "unlink /state/.tmp/00000001",
    ]
    assert disk.view("/state").peek("a") == DATA


def test_a_full_disk_keeps_nothing_of_a_write_and_takes_the_next_one() -> None:
    full = [True]

    def hook(name: str, path: str, size: int) -> int:
        if name == "write" and full[0]:
            full[0] = False
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return size

    disk = SimDisk(before_call=hook)
    storage = disk.storage("/state")
    with pytest.raises(StorageUnavailableError, match="No space left"):
        storage.execute(ops.WriteFile("a", [DATA]))
    assert storage.execute(ops.ListFiles("")) == []
    assert list(disk.list_folder("/state/.tmp")) == []
    assert storage.execute(ops.WriteFile("a", [DATA])) == len(DATA)


# ------------------------------------------------------------------------------------------------------- storages and views


def test_roots_are_apart_and_their_views_leave_temporary_files_out() -> None:
    disk = SimDisk()
    storage = disk.storage("/state")
    storage.execute(ops.WriteFile("job/a", [DATA]))
    storage.at("file:///sink").execute(ops.WriteFile("b", [DATA]))
    write(disk, "/state/.tmp/left", DATA, sync=True)
    state, sink = disk.view("/state"), disk.view("/sink")
    assert (state.root, state.paths(), state.paths("job"), state.paths("job/")) == ("/state", ["job/a"], ["job/a"], ["job/a"])
    assert (sink.root, sink.paths(), disk.view("/none").paths(), state.paths("none")) == ("/sink", ["b"], [], [])
    assert (state.peek("job/a"), state.size("job/a")) == (DATA, len(DATA))
    assert (state.peek("job"), state.size("job"), state.peek("none"), state.size("none")) == (None,) * 4
    assert disk.view("/").paths() == ["sink/b", "state/.tmp/left", "state/job/a"]
    with pytest.raises(InvalidConfigError, match="'gs'"):
        disk.storage("gs://bucket")


def test_temporary_names_never_collide_between_storages() -> None:
    disk = SimDisk()
    nonces = [disk.new_nonce(), disk.new_nonce()]
    first, second = disk.storage("/state"), disk.storage("/state")
    created: list[str] = []
    def note(name: str, path: str, size: int) -> int:
        if name == "create":
            created.append(path)
        return size

    disk.before_call = note
    for storage in (first, second, first.at("/state")):
        storage.execute(ops.WriteFile(f"a{len(created)}", [DATA]))
    assert len({*created, *nonces}) == 5


def test_a_name_that_was_found_lasts_once_it_was_synced() -> None:
    """Its writer had given it and died before the sync; its folders were never synced, either."""
    for seed in range(20):
        disk = SimDisk()
        for folder in ("/state", "/state/job", "/state/job/chk-1"):
            disk.mkdir(folder)
        descriptor = disk.create(f"/state/{PATH}")
        disk.write(descriptor, DATA)
        disk.fsync(descriptor)
        assert disk.storage("/state").execute(ops.SyncFile(PATH)) is True
        disk.power_loss(random.Random(seed))
        assert disk.storage("/state").execute(ops.ReadFile(PATH)) == DATA


def test_another_world_begins_with_what_is_there_and_neither_sees_the_other() -> None:
    disk = SimDisk()
    disk.mkdir("/folder")
    write(disk, "/folder/a", b"one", sync=True)
    disk.link("/folder/a", "/folder/b")
    other = disk.fork(lambda: 7)
    write(other, "/folder/c", b"its", sync=True)
    other.unlink("/folder/b")
    write(disk, "/folder/d", b"ours", sync=True)
    assert (disk.view("/folder").paths(), other.view("/folder").paths()) == (["a", "b", "d"], ["a", "c"])
    assert other.view("/folder").peek("a") == b"one"

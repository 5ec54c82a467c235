"""Copies of a checkpoint's files on a worker's own disk: what they are used for, what they are never trusted with (2e; I29)."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.errors import CorruptStateError, ObjectMissingError
from holdfast.statebackends.handles import (
    ChannelPiece,
    ChannelState,
    FileHandle,
    KeyedStateHandle,
    OperatorSubtaskState,
    PlaceholderHandle,
    SegmentHandle,
)
from holdfast.statebackends.layout import part_path
from holdfast.statebackends.local_recovery import copies as localcopies
from holdfast.statebackends.local_recovery.copies import (
    DEAD_AGE_S,
    LOCK_NAME,
    LocalCopies,
    LocalRecovery,
    is_dead,
    name_of,
    sweep_dead,
)
from holdfast.statebackends.local_recovery.storage import KeepingStorage, RecoveringStorage, RestoredBytes, held_paths, stored_files
from holdfast.statebackends.snapshot.parts import read_parts, write_part
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import DownloadFile, Operation, ReadFile, Storage, run_flow
from tests.examples import examples
from tests.statebackends.backend_harness import COUNT, TAGS, Cluster, owner

STATES = (COUNT, TAGS)


class Remote:
    """A storage that is no local disk, and counts what is read of it."""

    def __init__(self, root: Path) -> None:
        self.inner = LocalStorage(root)
        self.reads: list[str] = []

    @property
    def root(self) -> str:
        return self.inner.root

    def at(self, location: str) -> Storage:
        return self.inner.at(location)

    def execute(self, operation: Operation) -> Any:
        if isinstance(operation, DownloadFile | ReadFile):
            self.reads.append(operation.path)
        return self.inner.execute(operation)


class Job:
    """One operator with one writer of copies per life of a subtask."""

    pack_threshold = 0

    def __init__(self, root: Path, kind: Any) -> None:
        self.cluster = Cluster(root, kind)
        self.remote = Remote(root / "state")
        self.local = root / "workers"
        self.attempt = 0
        self.handles: dict[int, list[KeyedStateHandle]] = {}

    def recovery(self, job_id: str = "job") -> LocalRecovery:
        """As a worker process begins."""
        return LocalRecovery(str(self.local), job_id=job_id, state_directory="state", storage=self.remote)

    def life(self, subtask: int = 0, *, attempt: int | None = None, recovery: LocalRecovery | None = None) -> LocalCopies:
        self.attempt += attempt is None
        number = self.attempt if attempt is None else attempt
        copies = (recovery or self.recovery()).copies("vertex", subtask, number, f"n{number}{subtask}")
        copies.open()
        return copies

    def write(self, backends: list[KeyedBackendBase], numbers: range, value: int) -> None:
        for number in numbers:
            backend = owner(backends, f"key{number}")
            backend.get_state(COUNT).update(value)
            backend.get_state(TAGS).put("t", value)

    def read(self, backends: list[KeyedBackendBase]) -> dict[str, tuple[int, int]]:
        found = {}
        for backend in backends:
            for key in list(backend.keys("count")):
                name = backend.key_type.decode(key)
                owner([backend], name)
                found[name] = backend.get_state(COUNT).value(), backend.get_state(TAGS).get("t")
        return found

    def take(self, backend: KeyedBackendBase, copies: LocalCopies, number: int, base: int | None = None) -> list[str]:
        """The stored paths of what is acknowledged."""
        prefix = f"op-{backend.key_groups.start}-{self.attempt}-n"
        target = SnapshotTarget(number, f"job/chk-{number}", prefix, False, 50, f"{number}-{prefix}", base, self.pack_threshold)
        pending = backend.snapshot(number)
        handles = run_flow(pending.flow(target), KeepingStorage(self.remote, copies, number))
        pending.release()
        earlier = [part for handle in self.handles.get(base or 0, ()) for part in handle.parts if isinstance(part, FileHandle)]
        known = {(part.path, part.offset): part for part in earlier}
        paths = held_paths([OperatorSubtaskState(keyed=tuple(handles))], target.folder)
        copies.took(number, paths)
        for handle in handles:
            parts = tuple(
                known[part.path, part.offset or 0] if isinstance(part, PlaceholderHandle) else part for part in handle.parts
            )
            resolved = KeyedStateHandle(handle.key_groups, handle.format, handle.states, parts, handle.names)
            self.handles.setdefault(number, []).append(resolved)
        return sorted(paths)

    def restore(
        self, number: int, copies: LocalCopies | None, *, parallelism: int = 1, subtask: int = 0
    ) -> tuple[KeyedBackendBase, RestoredBytes]:
        backend = self.cluster.backend(STATES, parallelism=parallelism, subtask=subtask)
        restored = RestoredBytes()
        ours = [handle for handle in self.handles[number] if len(handle.key_groups.intersection(backend.key_groups))]
        folder = f"job/chk-{number}"
        wanted = stored_files(OperatorSubtaskState(keyed=tuple(ours)), folder, "op")
        self.remote.reads.clear()
        storage = RecoveringStorage(self.remote, wanted, restored, copies, keep_for=number)
        backend.restore(ours, storage, folder, checkpoint_id=number)
        return backend, restored


@pytest.fixture(params=["filesystem", "rocksdb"])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(tmp_path, request.param)
    yield job
    job.cluster.close()


@pytest.fixture
def rocks(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, "rocksdb")
    yield job
    job.cluster.close()


def first_checkpoint(job: Job, numbers: range = range(300)) -> tuple[KeyedBackendBase, LocalCopies, list[str]]:
    backend, copies = job.cluster.backend(STATES), job.life()
    job.write([backend], numbers, 1)
    return backend, copies, job.take(backend, copies, 1)


# ------------------------------------------------------------------------------------------------------------ what it is for


def test_a_successor_on_the_same_host_reads_nothing_of_storage(job: Job) -> None:
    backend, copies, paths = first_checkpoint(job)
    assert copies.held == tuple(paths)
    before = job.read([backend])
    copies.close()  # as any death does
    again, restored = job.restore(1, job.life())
    assert job.read([again]) == before
    assert job.remote.reads == []
    assert (restored.local, restored.remote, restored.damaged) == (_size(job, 1), 0, 0)


def test_pieces_of_a_packed_file_are_taken_from_its_copy_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    job = Job(tmp_path, "filesystem")
    job.pack_threshold = 1 << 20
    backend, copies, paths = first_checkpoint(job)
    assert len(paths) == 1, "all tables are in one file"
    before = job.read([backend])
    copies.close()
    again, restored = job.restore(1, job.life())
    assert job.read([again]) == before
    assert job.remote.reads == []
    assert (restored.local, restored.remote, restored.damaged) == (_size(job, 1), 0, 0)
    assert job.restore(1, None)[1].remote == _size(job, 1)
    assert len(job.remote.reads) == 1, "one request for all pieces"
    shutil.rmtree(job.local)
    copies = job.life()
    assert job.restore(1, copies)[1].remote == _size(job, 1)
    copies.close()
    assert job.restore(1, job.life())[1].remote == 0, "what came from storage was kept"
    (copy,) = [path for path in Path(copies.folder).iterdir() if path.name != "lock"]
    damage = bytearray(copy.read_bytes())
    damage[5] ^= 1
    for content in (bytes(damage), bytes(damage[:-1])):
        shutil.rmtree(job.local)
        os.makedirs(copies.folder)
        copy.write_bytes(content)
        again, restored = job.restore(1, job.life())
        assert job.read([again]) == before
        assert restored.damaged >= 1
        assert restored.local + restored.remote == _size(job, 1)
        assert restored.remote > 0
    job.cluster.close()


def test_without_copies_all_of_it_comes_from_storage(job: Job) -> None:
    backend, _, paths = first_checkpoint(job)
    again, restored = job.restore(1, None)
    assert job.read([again]) == job.read([backend])
    assert sorted(job.remote.reads) == paths
    assert (restored.local, restored.remote) == (0, _size(job, 1))


def test_what_came_from_storage_is_kept_for_the_next_restore(job: Job) -> None:
    _, _, paths = first_checkpoint(job)
    shutil.rmtree(job.local)
    life = job.life()
    _, restored = job.restore(1, life)
    assert restored.local == 0
    assert life.held == tuple(paths)
    life.close()
    _, restored = job.restore(1, job.life())
    assert (restored.remote, job.remote.reads) == (0, [])


def test_increments_are_restored_from_the_copies_of_several_lives(rocks: Job) -> None:
    backend, copies, first = first_checkpoint(rocks)
    rocks.write([backend], range(5), 2)
    second = rocks.take(backend, copies, 2, base=1)
    assert set(first) & set(second), "the base's table is part of it"
    assert copies.confirm(1)
    copies.sweep()
    assert copies.held == tuple(sorted({*first, *second}))
    copies.close()
    life = rocks.life()
    restored, told = rocks.restore(2, life)
    assert told.remote == 0
    rocks.write([restored], range(10, 13), 3)
    third = rocks.take(restored, life, 3, base=2)
    assert set(third) & set(first)
    assert life.confirm(3)
    life.sweep()
    assert set(life.held) == set(third)
    assert len(os.listdir(rocks.local / "recovery" / os.listdir(rocks.local / "recovery")[0])) == 1, "the older life is gone"
    expected = rocks.read([restored])
    life.close()
    again, told = rocks.restore(3, rocks.life())
    assert (told.remote, rocks.read([again])) == (0, expected)


def test_delta_runs_are_restored_from_copies_with_the_table_that_they_lie_upon(tmp_path: Path) -> None:
    job = Job(tmp_path, "filesystem")
    backend, copies, first = first_checkpoint(job)
    job.write([backend], range(5), 2)
    second = job.take(backend, copies, 2, base=1)
    assert set(first) < set(second), "the base's tables, and runs"
    assert copies.confirm(2)
    copies.sweep()
    assert copies.held == tuple(second)
    copies.close()
    life = job.life()
    again, told = job.restore(2, life)
    assert (told.remote, job.remote.reads, job.read([again])) == (0, [], job.read([backend]))
    assert life.held == tuple(second)
    job.cluster.close()


def test_a_running_database_never_changes_its_copies(rocks: Job) -> None:
    _, copies, _ = first_checkpoint(rocks, range(2_000))
    copies.close()
    life = rocks.life()
    backend, _ = rocks.restore(1, life)
    for number in range(2, 6):
        rocks.write([backend], range(0, 2_000, number), number)
        rocks.take(backend, life, number, base=None)
    backend.dispose()
    life.close()
    _, told = rocks.restore(1, rocks.life())
    assert (told.remote, told.damaged) == (0, 0)


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2), (1, 2), (2, 1)])
def test_another_parallelism_finds_the_copies_of_all_subtasks_of_the_host(job: Job, old: int, new: int) -> None:
    backends = [job.cluster.backend(STATES, parallelism=old, subtask=subtask) for subtask in range(old)]
    job.write(backends, range(200), 1)
    job.attempt = 1
    lives = [job.life(subtask, attempt=1) for subtask in range(old)]
    for backend, life in zip(backends, lives, strict=True):
        job.take(backend, life, 1)
        life.close()
    expected = job.read(backends)
    parts = [job.restore(1, job.life(subtask, attempt=2), parallelism=new, subtask=subtask) for subtask in range(new)]
    assert [told.remote for _, told in parts] == [0] * new
    assert job.read([backend for backend, _ in parts]) == expected


# ------------------------------------------------------------------------------------------------------- never trusted


def _truncate(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.unlink()
    path.touch()


def _other(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(os.urandom(size))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


@pytest.mark.parametrize("damage", [_truncate, _flip, _empty, _other, _folder, _dangling, Path.unlink])
def test_storage_stands_in_for_each_damaged_copy(job: Job, damage: Callable[[Path], None]) -> None:
    backend, copies, paths = first_checkpoint(job)
    expected = job.read([backend])
    copies.close()
    for path in paths:
        damage(Path(copies.folder, name_of(path)))
    life = job.life()
    again, restored = job.restore(1, life)
    assert job.read([again]) == expected
    assert sorted(job.remote.reads) == paths
    assert restored.damaged == (0 if damage in (Path.unlink, _dangling) else len(paths))
    assert life.held == tuple(paths), "good ones, now"
    life.close()
    assert job.restore(1, job.life())[1].remote == 0


def test_every_single_bit_matters(job: Job) -> None:
    backend, copies, paths = first_checkpoint(job, range(3))
    expected = job.read([backend])
    copies.close()
    path = max(paths, key=lambda path: Path(copies.folder, name_of(path)).stat().st_size)
    place = Path(copies.folder, name_of(path))
    content = place.read_bytes()
    step = max(1, len(content) // 12)
    for offset in range(0, len(content), step):
        place.unlink(missing_ok=True)
        place.write_bytes(content[:offset] + bytes([content[offset] ^ 0x10]) + content[offset + 1 :])
        life = job.life()
        again, restored = job.restore(1, life)
        assert (restored.damaged, job.remote.reads, job.read([again])) == (1, [path], expected)
        life.close()
        shutil.rmtree(life.folder)  # what it kept itself is good


def test_when_copy_and_storage_are_both_damaged_the_error_is_the_storages(rocks: Job) -> None:
    _, copies, paths = first_checkpoint(rocks)
    copies.close()
    table = next(path for path in paths if path.endswith(".sst"))
    _flip(Path(copies.folder, name_of(table)))
    _flip(Path(rocks.remote.root, table))
    with pytest.raises(CorruptStateError, match="the checksum does not match") as caught:
        rocks.restore(1, rocks.life())
    assert (caught.value.fields["path"], caught.value.fields["reason"]) == (table, "checksum"), "the reason that every reader gives"


def test_nothing_but_what_the_snapshot_names_is_taken_from_a_copy(tmp_path: Path) -> None:
    job = Job(tmp_path, "filesystem")
    life = job.life()
    life.keep_bytes(1, "job/chk-1/other", [b"local"])
    storage = RecoveringStorage(job.remote, {}, RestoredBytes(), life, keep_for=1)
    with pytest.raises(ObjectMissingError):
        storage.execute(ReadFile("job/chk-1/other"))
    handle = FileHandle("x", 5, "xxh3_128:" + "0" * 32)
    job.remote.inner.execute(localcopies_write("job/chk-1/x", b"01234"))
    storage = RecoveringStorage(job.remote, {("job/chk-1/x", 0): handle}, RestoredBytes(), life, keep_for=1)
    assert storage.execute(ReadFile("job/chk-1/x", 1, 2)) == b"12", "a piece can't be checked"
    assert storage.execute(ReadFile("job/chk-1/x")) == b"01234"
    pieces = [SegmentHandle("x", 2, checksum_of(b"01"), 0, 5), SegmentHandle("x", 3, "xxh3_128:" + "0" * 32, 2, 5)]
    wanted: dict[tuple[str, int], FileHandle] = {("job/chk-1/x", piece.offset): piece for piece in pieces}
    storage = RecoveringStorage(job.remote, wanted, RestoredBytes(), life, keep_for=1)
    assert storage.execute(ReadFile("job/chk-1/x", 0, 2)) == b"01"
    assert storage.execute(ReadFile("job/chk-1/x", 0, 5)) == b"01234"
    assert storage.execute(ReadFile("job/chk-1/x", 1, 4)) == b"1234"
    assert life.held == ("job/chk-1/other",), "what fails its checksum is not kept, and no piece of a file"
    assert (storage.root, storage.at(str(tmp_path)).root) == (job.remote.root, str(tmp_path))


def localcopies_write(path: str, data: bytes) -> Operation:
    from holdfast.statebackends.storage.port import WriteFile

    return WriteFile(path, [data])


# ---------------------------------------------------------------------------------------------------------- crash points


class Killed(BaseException):
    """The process ends here."""


CALLS = ("link", "rename", "unlink", "makedirs", "open", "listdir", "utime")


class Breaking:
    """Lets the n-th system call of localcopies fail, as a death or as a disk that is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int, error: BaseException) -> None:
        self.calls = 0
        for name in CALLS:
            real = getattr(os, name)
            monkeypatch.setattr(localcopies.os, name, self._wrapped(real, fails_at, error))  # type: ignore[attr-defined]
        monkeypatch.setattr(localcopies.shutil, "copyfile", self._wrapped(shutil.copyfile, fails_at, error))  # type: ignore[attr-defined]

    def _wrapped(self, real: Any, fails_at: int, error: BaseException) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if not any(str(argument).find("/recovery") >= 0 for argument in arguments):
                return real(*arguments, **options)
            self.calls += 1
            if self.calls == fails_at:
                raise error
            return real(*arguments, **options)

        return call


def _life_of_a_worker(job: Job) -> None:
    """Everything that copies go through: kept, confirmed, given up, restored, kept again."""
    copies = job.life()
    try:
        backend, _ = job.restore(1, copies)
        job.write([backend], range(40), 7)
        job.take(backend, copies, 2)
        copies.confirm(2)
        copies.sweep()
    finally:
        copies.close()


@pytest.mark.parametrize("kills", [True, False])
def test_a_death_or_an_error_at_any_step_costs_a_download_at_most(job: Job, kills: bool) -> None:
    backend, copies, _ = first_checkpoint(job, range(60))
    expected = job.read([backend])
    copies.close()
    error: BaseException = Killed() if kills else OSError(28, "No space left on device")
    pristine = job.cluster.root / "pristine"
    shutil.copytree(job.cluster.root / "workers", pristine / "workers")
    shutil.copytree(job.remote.root, pristine / "state")
    for fails_at in range(1, 200):
        for name in ("workers", "state"):
            shutil.rmtree(job.cluster.root / name)
            shutil.copytree(pristine / name, job.cluster.root / name)
        job.handles = {1: job.handles[1]}
        with pytest.MonkeyPatch.context() as patch:
            breaking = Breaking(patch, fails_at, error)
            try:
                _life_of_a_worker(job)
            except Killed:
                assert kills
        again, restored = job.restore(1, life := job.life())
        assert job.read([again]) == expected
        assert restored.damaged == 0, "a copy appears whole"
        life.close()
        again.dispose()
        if breaking.calls < fails_at:
            break
    else:
        raise AssertionError("never came to an end")
    assert fails_at > 8


class Flights:
    """A subtask that keeps copies of its in-flight data, in lives that follow each other."""

    def __init__(self, root: Path) -> None:
        self.remote = Remote(root / "state")
        self.local = root / "workers"
        self.lives = 0
        self.channels: dict[int, ChannelState] = {}

    def life(self) -> LocalCopies:
        self.lives += 1
        recovery = LocalRecovery(str(self.local), job_id="job", state_directory="state", storage=self.remote)
        copies = recovery.copies("vertex", 0, self.lives, f"n{self.lives}")
        copies.open()
        return copies

    def store(self, number: int, copies: LocalCopies) -> None:
        folder, data = f"job/chk-{number}", self.data(number)
        target = SnapshotTarget(number, folder, f"count-0-{self.lives}-n", False, 0)
        part = run_flow(write_part(data, "inflight-0", target), KeepingStorage(self.remote, copies, number))
        channel = ChannelState("in", None, "count", 0, 0, "hash", "input", 0, 3, part, (ChannelPiece(0, 0, len(data), 3),))
        copies.took(number, held_paths([], folder, [channel]))
        self.channels[number] = channel

    def restore(self, number: int, copies: LocalCopies) -> RestoredBytes:
        """As a subtask's channels are restored (`operators/task/restored_channels.py`); it is what was stored."""
        folder, part, restored = f"job/chk-{number}", self.channels[number].part, RestoredBytes()
        assert isinstance(part, FileHandle)
        wanted = {(part_path(folder, part.path, operator="count"), part.offset): part}
        storage = RecoveringStorage(self.remote, wanted, restored, copies, keep_for=number)
        assert run_flow(read_parts([part], folder, operator="count"), storage) == [self.data(number)]
        return restored

    @staticmethod
    def data(number: int) -> bytes:
        return b"in flight at %d, " % number * 5


def test_in_flight_data_is_read_of_its_copy_and_of_storage_where_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    flights = Flights(tmp_path)
    copies = flights.life()
    flights.store(1, copies)
    copies.close()
    size = len(flights.data(1))
    copy = Path(copies.folder, name_of(copies.held[0]))
    for length in [size, *range(size)]:
        copy.unlink()
        copy.write_bytes(flights.data(1)[:length])
        restored = flights.restore(1, life := flights.life())
        is_whole = length == size
        assert restored == RestoredBytes(size if is_whole else 0, 0 if is_whole else size, int(not is_whole))
        shutil.rmtree(life.folder)  # it has a copy of its own by now


@pytest.mark.parametrize("kills", [True, False])
def test_a_death_or_an_error_at_any_step_leaves_in_flight_data_to_be_restored(tmp_path: Path, kills: bool) -> None:
    """Killed while it restores it, keeps it, stores the next or gives it up: the next life restores it whole."""
    error: BaseException = Killed() if kills else OSError(28, "No space left on device")
    for fails_at in range(1, 200):
        flights = Flights(tmp_path / f"{fails_at}")
        first = flights.life()
        flights.store(1, first)
        first.close()
        with pytest.MonkeyPatch.context() as patch:
            breaking = Breaking(patch, fails_at, error)
            life = None
            try:
                life = flights.life()
                flights.restore(1, life)
                flights.store(2, life)
                life.confirm(2)
                life.sweep()
            except Killed:
                assert kills
        if life is not None:
            life.close()
        for number in flights.channels:
            assert flights.restore(number, flights.life()).damaged == 0, "a copy appears whole"
        if breaking.calls < fails_at:
            break
    else:
        raise AssertionError("never came to an end")
    assert fails_at > 8


def test_a_folder_of_somebody_else_is_not_used(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localcopies.os, "geteuid", lambda: 4321)  # type: ignore[attr-defined]
    _, copies, _ = first_checkpoint(job)
    assert (copies.is_open, copies.held) == (False, ())
    copies.close()
    assert job.restore(1, job.life())[1].local == 0


def test_a_directory_that_can_not_be_made_keeps_nothing_and_breaks_nothing(job: Job) -> None:
    job.local.write_bytes(b"a file")
    backend, copies, _ = first_checkpoint(job)
    assert copies.confirm(1)
    copies.sweep()
    copies.delete()
    again, restored = job.restore(1, job.life())
    assert (job.read([again]), restored.local) == (job.read([backend]), 0)


def test_on_the_disk_of_the_state_directory_only_links_are_kept(tmp_path: Path) -> None:
    for kind, suffixes in (("filesystem", set()), ("rocksdb", {".sst"})):
        job = Job(tmp_path / kind, kind)
        job.remote = job.remote.inner  # type: ignore[assignment]
        os.makedirs(job.remote.root)
        _, copies, paths = first_checkpoint(job)
        assert {os.path.splitext(path)[1] for path in copies.held if path.endswith(".sst")} == suffixes
        assert (kind == "filesystem") == (copies.held == ())
        table = next((path for path in paths if path.endswith(".sst")), None)
        if table is not None:
            assert Path(copies.folder, name_of(table)).stat().st_nlink > 1, "another name, no other bytes"
        job.cluster.close()


# ------------------------------------------------------------------------------------------------------------- bounded


def owners(job: Job) -> list[str]:
    return sorted(path.name for path in job.local.glob("recovery/*/*"))


def test_copies_of_older_and_of_aborted_checkpoints_go(job: Job) -> None:
    backend, copies, _ = first_checkpoint(job)
    kept: dict[int, list[str]] = {}
    for number in (2, 3, 4):
        job.write([backend], range(number * 10), number)
        kept[number] = job.take(backend, copies, number)
    assert copies.forget(3)
    assert copies.confirm(2)
    copies.sweep()
    assert copies.held == tuple(sorted({*kept[2], *kept[4]}))
    assert copies.confirm(4)
    copies.sweep()
    assert copies.held == tuple(kept[4])
    assert sorted(os.listdir(copies.folder)) == sorted([LOCK_NAME, *map(name_of, kept[4])])
    assert not copies.confirm(2), "late"
    assert not copies.forget(2)
    assert not copies.confirm(9), "a savepoint is no checkpoint of ours"
    assert copies.held == tuple(kept[4])


def test_older_lives_go_with_the_first_confirmed_checkpoint_and_not_before(job: Job) -> None:
    backend, first, _ = first_checkpoint(job)
    zombie = job.life(1)
    newer = job.life(2, attempt=9)
    stranger = job.recovery("other-job").copies("vertex", 0, 1, "n")
    stranger.open()
    for copies in (first, newer, stranger):
        copies.close()
    life = job.life(attempt=5)
    job.restore(1, life)
    job.take(backend, life, 2)
    assert not life.confirm(1), "the notice of the restored checkpoint comes again"
    life.forget(7)
    life.sweep()
    assert Path(first.folder).exists(), "another subtask may still be about to restore from it"
    assert life.confirm(2)
    life.sweep()
    assert not Path(first.folder).exists()
    assert [Path(each.folder).exists() for each in (zombie, newer, stranger, life)] == [True] * 4
    zombie.close()
    life.sweep()
    assert Path(zombie.folder).exists(), "once; the next attempt does it"


def test_when_a_job_is_over_its_copies_go_and_those_of_others_stay(job: Job) -> None:
    recovery = job.recovery()
    mine, dead = job.life(recovery=recovery), job.life(1)
    living, stranger = job.life(2), job.recovery("other").copies("vertex", 0, 1, "n")
    stranger.open()
    dead.close()
    recovery.end()
    assert [Path(each.folder).exists() for each in (mine, dead, living, stranger)] == [False, False, True, True]
    mine.keep_bytes(1, "job/chk-1/x", [b"late"])
    assert not Path(mine.folder).exists()
    living._recovery.end()
    assert owners(job) == [os.path.basename(stranger.folder)]
    assert not Path(living.folder).parent.exists()


def test_what_nobody_came_back_for_is_deleted_after_a_day(job: Job) -> None:
    _, dead, _ = first_checkpoint(job)
    alive = job.life(1)
    dead.close()
    lockless = Path(dead.folder).with_name("3-vertex-0-torn")
    lockless.mkdir()
    root, now_s = str(job.local / "recovery"), time.time()
    sweep_dead(root, now_s=now_s + DEAD_AGE_S - 60)
    assert len(owners(job)) == 3
    for path in (Path(dead.folder, LOCK_NAME), lockless):
        os.utime(path, (now_s - DEAD_AGE_S - 60,) * 2)
    assert is_dead(dead.folder)
    assert not is_dead(alive.folder)
    job.recovery("another").copies("v", 0, 1, "n").open()  # a worker of any job
    assert [Path(dead.folder).exists(), lockless.exists(), Path(alive.folder).exists()] == [False, False, True]


@settings(max_examples=examples(60), deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["keep", "took", "forget", "confirm", "sweep"]), st.integers(1, 6), st.integers(0, 5)),
        max_size=40,
    )
)
def test_what_is_held_is_what_some_checkpoint_holds(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("held")
    job = Job(folder, "filesystem")
    life = job.life()
    files: dict[int, set[str]] = {}
    taken: set[int] = set()
    there: set[str] = set()
    for step, number, file in steps:
        path = f"job/{file}"
        if step == "keep":
            life.keep_bytes(number, path, [b"x"])
            files.setdefault(number, set()).add(path)
            there.add(path)
        elif step == "took":
            paths = files.get(number, set()) | ({path} if path in there else set())
            life.took(number, paths)
            files[number] = set(paths)
            taken.add(number)
        elif step == "forget":
            assert life.forget(number) == (files.pop(number, None) is not None)
            taken.discard(number)
        elif step == "confirm":
            assert life.confirm(number) == (number in taken)
            if number in taken:
                files = {known: paths for known, paths in files.items() if known >= number}
                taken = {known for known in taken if known >= number}
        else:
            life.sweep()
            there &= set().union(*files.values())
        assert set(life.held) == there
        assert set(os.listdir(life.folder)) == {LOCK_NAME, *map(name_of, there)}
    life.close()
    shutil.rmtree(folder)


def _size(job: Job, number: int) -> int:
    return sum(part.length for handle in job.handles[number] for part in handle.parts if isinstance(part, FileHandle))

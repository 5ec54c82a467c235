"""Increments of the rocksdb backend: what is stored again and what is not, and what a restore of one holds (J10, J11, J16, J18)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, InvariantError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    OperatorState,
    OperatorSubtaskState,
    PlaceholderHandle,
    StateHandle,
)
from holdfast.statebackends.layout import shared_name, writer_of
from holdfast.statebackends.rocksdb.backend import RocksKeyedBackend
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.snapshot.increments import CHECKPOINTS_MAX, StoredFiles
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata, encode_metadata
from holdfast.statebackends.snapshot.parts import read_part, verify_snapshot
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.verify import verify_files
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import DeleteFile, PutIfAbsent, run_flow
from tests.statebackends.backend_harness import COUNT, MAX_PARALLELISM, TAGS, Cluster, owner

DESCRIPTORS = (COUNT, TAGS)


@dataclass
class Job:
    """One operator whose checkpoints share files; what the coordinator does is done at once."""

    cluster: Cluster
    completed: dict[int, tuple[KeyedStateHandle, ...]] = field(default_factory=dict)
    attempt: int = 1
    pack_threshold: int = 0

    def store(
        self, backends: Sequence[KeyedBackendBase], number: int, base: int | None, *, threshold: int = 0
    ) -> list[KeyedStateHandle]:
        """What the subtasks acknowledge."""
        handles: list[KeyedStateHandle] = []
        for subtask, backend in enumerate(backends):
            prefix = f"op-{subtask}-{self.attempt}-n"
            target = SnapshotTarget(
                number, f"job/chk-{number}", prefix, False, threshold, f"{number}-{self.attempt}-op-{subtask}-n", base,
                self.pack_threshold,
            )  # fmt: skip
            pending = backend.snapshot(number)
            handles += run_flow(pending.flow(target), self.cluster.storage)
            pending.release()
        return handles

    def checkpoint(
        self, backends: Sequence[KeyedBackendBase], number: int, base: int | None, *, threshold: int = 0
    ) -> list[KeyedStateHandle]:
        """What is acknowledged; `completed` has it with its placeholders resolved."""
        acked = self.store(backends, number, base, threshold=threshold)
        parts = (part for handle in self.completed.get(base or 0, ()) for part in handle.parts)
        known = {(part.path, part.offset): part for part in parts if isinstance(part, FileHandle)}
        self.completed[number] = tuple(
            msgspec.structs.replace(
                handle,
                parts=tuple(
                    known[part.path, part.offset or 0] if isinstance(part, PlaceholderHandle) else part for part in handle.parts
                ),
            )
            for handle in acked
        )
        return acked

    def restored(self, number: int, parallelism: int = 1, *, own: bool = True) -> list[KeyedBackendBase]:
        self.attempt += 1
        backends = [
            self.cluster.backend(DESCRIPTORS, parallelism=parallelism, subtask=subtask) for subtask in range(parallelism)
        ]
        for backend in backends:
            backend.restore(
                self.completed[number], self.cluster.storage, f"job/chk-{number}", checkpoint_id=number if own else None
            )
        return backends

    def snapshot(self, number: int, kind: str = "checkpoint") -> StoredSnapshot:
        """The completed checkpoint as tools see it."""
        subtasks = tuple(OperatorSubtaskState(keyed=(handle,)) for handle in self.completed[number])
        operator = OperatorState("op", "f" * 32, "op", len(subtasks), MAX_PARALLELISM, subtasks)
        metadata = SnapshotMetadata(
            job_id="job", job_name="j", checkpoint_id=number, kind=kind, attempt=1, epoch=1,  # type: ignore[arg-type]
            trigger_timestamp_ms=0, completion_timestamp_ms=0, operators=(operator,),
        )  # fmt: skip
        self.cluster.storage.execute(PutIfAbsent(f"job/chk-{number}/_metadata", encode_metadata(metadata)))
        return StoredSnapshot(metadata, self.cluster.storage, f"job/chk-{number}")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    cluster = Cluster(tmp_path, "rocksdb")
    yield Job(cluster)
    cluster.close()


def write(backends: Sequence[KeyedBackendBase], numbers: Sequence[int], value: int) -> None:
    for number in numbers:
        backend = owner(backends, f"key{number}")
        backend.get_state(COUNT).update(value)
        backend.get_state(TAGS).put("t", value)


def read(backends: Sequence[KeyedBackendBase]) -> dict[str, int]:
    found: dict[str, int] = {}
    for backend in backends:
        for key in list(backend.keys("count")):
            name = backend.key_type.decode(key)
            owner([backend], name)
            found[name] = backend.get_state(COUNT).value()
            assert backend.get_state(TAGS).get("t") == found[name]
    return found


def placeholders(handles: Sequence[KeyedStateHandle]) -> set[str]:
    return {part.path for handle in handles for part in handle.parts if isinstance(part, PlaceholderHandle)}


def written(handles: Sequence[KeyedStateHandle]) -> set[str]:
    parts = (part for handle in handles for part in handle.parts if isinstance(part, FileHandle))
    return {part.path for part in parts if shared_name(part.path) is not None}


def test_an_increment_stores_what_its_base_does_not_have(job: Job) -> None:
    backends = [job.cluster.backend(DESCRIPTORS)]
    write(backends, range(300), 1)
    first = job.checkpoint(backends, 1, None)
    assert (len(written(first)), placeholders(first)) == (1, set())
    assert all(writer_of(shared_name(path) or "") == 1 for path in written(first))
    write(backends, range(5), 2)
    second = job.checkpoint(backends, 2, 1)
    assert placeholders(second) == written(first)
    assert len(written(second)) == 1
    (handle,) = second
    assert handle.new_size < handle.size
    assert handle.size == job.completed[2][0].size, "a placeholder counts for its file"
    third = job.checkpoint(backends, 3, 2)
    assert (placeholders(third), written(third)) == (written(first) | written(second), set())
    exclusive = {part.path for part in third[0].parts if isinstance(part, FileHandle)}
    assert {path.rpartition("-")[2] for path in exclusive} >= {"CURRENT", "config.json"}
    assert all(shared_name(path) is None for path in exclusive)


def test_j16_a_checkpoint_that_was_never_confirmed_is_not_built_upon(job: Job) -> None:
    backends = [job.cluster.backend(DESCRIPTORS)]
    write(backends, range(300), 1)
    job.checkpoint(backends, 1, None)
    write(backends, range(5), 2)
    lost = job.store(backends, 2, 1)
    third = job.checkpoint(backends, 3, 1)
    assert not placeholders(third) & written(lost)
    assert {name.rpartition("-")[2] for name in written(third)} == {name.rpartition("-")[2] for name in written(lost)}, "again"


def test_a_base_that_is_not_known_here_makes_a_full_checkpoint(job: Job) -> None:
    backends = [job.cluster.backend(DESCRIPTORS)]
    write(backends, range(300), 1)
    job.checkpoint(backends, 1, None)
    assert placeholders(job.checkpoint(backends, 2, 1))
    backends[0].notify_checkpoint_aborted(3)
    assert placeholders(job.store(backends, 4, 3)) == set(), "3 was never taken here"
    assert placeholders(job.store(backends, 5, None)) == set()


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_restored_increment_is_built_upon_where_its_files_are(job: Job, parallelism: int) -> None:
    backends = [job.cluster.backend(DESCRIPTORS, parallelism=2, subtask=subtask) for subtask in range(2)]
    write(backends, range(400), 1)
    job.checkpoint(backends, 1, None)
    write(backends, range(0, 400, 50), 2)
    job.checkpoint(backends, 2, 1)
    before = read(backends)
    restored = job.restored(2, parallelism)
    assert read(restored) == before
    write(restored, range(7), 3)
    third = job.checkpoint(restored, 3, 2)
    assert placeholders(third) <= written(job.completed[2])
    assert placeholders(third)
    again = read(restored)
    for backend in (*backends, *restored):
        backend.dispose()
    assert read(job.restored(3, 2)) == again


def test_j18_what_belongs_to_others_is_stored_anew(job: Job) -> None:
    backends = [job.cluster.backend(DESCRIPTORS)]
    write(backends, range(300), 1)
    job.checkpoint(backends, 1, None)
    restored = job.restored(1, own=False)
    write(restored, range(5), 2)
    second = job.store(restored, 2, None)
    assert placeholders(second) == set()
    assert all(writer_of(shared_name(path) or "") == 2 for path in written(second))


def test_an_abandoned_clone_may_give_new_tables_the_numbers_of_later_ones(job: Job) -> None:
    """A restore goes back to 1; the tables that came after it get other bytes under the same local names."""
    backends = [job.cluster.backend(DESCRIPTORS)]
    write(backends, range(300), 1)
    job.checkpoint(backends, 1, None)
    write(backends, range(5), 2)
    abandoned = job.store(backends, 2, 1)
    restored = job.restored(1)
    write(restored, range(100, 200), 3)
    third = job.checkpoint(restored, 3, 1)
    assert not (written(third) | placeholders(third)) & written(abandoned)
    assert read(job.restored(3)) == {f"key{number}": 3 if 100 <= number < 200 else 1 for number in range(300)}


def test_a_local_file_that_is_not_the_stored_one_is_never_passed_off_as_it(job: Job) -> None:
    backend = job.cluster.backend(DESCRIPTORS)
    assert isinstance(backend, RocksKeyedBackend)
    write([backend], range(300), 1)
    job.checkpoint([backend], 1, None)
    (name, handle), *_ = backend._stored.of_base(1).items()
    backend._stored.remember(1, {name: msgspec.structs.replace(handle, length=handle.length + 1)})
    with pytest.raises(InvariantError, match=r"\.sst has"):
        job.store([backend], 2, 1)


def test_small_tables_travel_inline_each_time(job: Job) -> None:
    backends = [job.cluster.backend(DESCRIPTORS)]
    write(backends, range(10), 1)
    job.checkpoint(backends, 1, None, threshold=20_480)
    second = job.checkpoint(backends, 2, 1, threshold=20_480)
    assert (placeholders(second), written(second)) == (set(), set())
    tables = [part for name, part in zip(second[0].names, second[0].parts, strict=True) if name.endswith(".sst")]
    assert tables
    assert all(isinstance(part, InlineHandle) for part in tables)


def test_switched_off_everything_is_exclusive(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "rocksdb", StateBackendSettings(incremental=False))
    job = Job(cluster)
    backends = [cluster.backend(DESCRIPTORS)]
    write(backends, range(300), 1)
    job.checkpoint(backends, 1, None)
    second = job.checkpoint(backends, 2, 1)
    assert (placeholders(second), written(second)) == (set(), set())
    cluster.close()


# ------------------------------------------------------------------------------------------------------------------ tools


def two_checkpoints(job: Job) -> StoredSnapshot:
    backends = [job.cluster.backend(DESCRIPTORS)]
    write(backends, range(300), 1)
    job.checkpoint(backends, 1, None)
    write(backends, range(5), 2)
    job.checkpoint(backends, 2, 1)
    return job.snapshot(2)


def test_an_increment_is_verified_with_what_it_shares(job: Job) -> None:
    snapshot = two_checkpoints(job)
    assert run_flow(verify_snapshot(snapshot.metadata, snapshot.folder), job.cluster.storage) == []
    assert run_flow(verify_files(snapshot), job.cluster.storage).is_sound
    names = os.listdir(Path(job.cluster.storage.root, "job/shared"))
    assert len(names) == 2
    for name in names:
        path = Path(job.cluster.storage.root, "job/shared", name)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        (problem,) = run_flow(verify_snapshot(snapshot.metadata, snapshot.folder), job.cluster.storage)
        assert (problem.kind.value, problem.path) == ("checksum", f"job/shared/{name}")
        with pytest.raises(CorruptStateError, match="checksum"):
            job.restored(2)
        path.write_bytes(content)


def test_a_shared_file_that_is_missing_is_named(job: Job) -> None:
    snapshot = two_checkpoints(job)
    (name, *_) = sorted(os.listdir(Path(job.cluster.storage.root, "job/shared")))
    job.cluster.storage.execute(DeleteFile(f"job/shared/{name}"))
    (problem,) = run_flow(verify_files(snapshot), job.cluster.storage).problems
    assert (problem.kind.value, problem.operator) == ("missing", "op")
    with pytest.raises(CorruptStateError, match=f"operator 'op': job/shared/{name}: the file is missing"):
        job.restored(2)


def test_a_copy_of_an_increment_needs_nothing_beside_itself(job: Job, tmp_path: Path) -> None:
    snapshot = two_checkpoints(job)
    elsewhere = LocalStorage(tmp_path / "elsewhere")
    copied = copy_snapshot(snapshot, elsewhere, "chk-2")
    assert (copied.metadata.kind, copied.is_self_contained) == ("savepoint", True)
    parts = [part for handle in copied.metadata.operators[0].subtasks[0].keyed for part in handle.parts]
    assert not any(".." in part.path for part in parts if isinstance(part, FileHandle))
    assert run_flow(verify_files(copied), elsewhere).is_sound
    assert diff_snapshots(snapshot, copied).is_same


def test_a_savepoint_that_shares_a_file_can_not_be_restored(job: Job) -> None:
    two_checkpoints(job)
    metadata = msgspec.structs.replace(job.snapshot(2).metadata, kind="savepoint")
    problems = run_flow(verify_snapshot(metadata, "job/chk-2"), job.cluster.storage)
    assert {problem.kind.value for problem in problems} == {"path"}
    assert all("leaves the folder of the savepoint" in problem.detail for problem in problems)


@pytest.mark.parametrize("folder", ["job/savepoint-1", "job/chk-1x", "chk-1", "job/chk-", "elsewhere"])
def test_only_a_checkpoint_of_a_job_has_files_beside_its_folder(job: Job, folder: str) -> None:
    part = FileHandle("../shared/1-1-op-0-n-000009.sst", 1, checksum_of(b"x"))
    with pytest.raises(CorruptStateError, match="leaves the folder"):
        run_flow(read_part(part, folder), job.cluster.storage)


@pytest.mark.parametrize(
    "path",
    ["../shared/a/b", "../shared/../x", "../shared/..", "../shared/.", "../shared/", "../other/x", "x/../../shared/a", "../shared"],
)
def test_no_other_path_leads_out_of_a_checkpoint(job: Job, path: str) -> None:
    with pytest.raises(CorruptStateError, match="leaves the folder"):
        run_flow(read_part(FileHandle(path, 1, checksum_of(b"x")), "job/chk-1"), job.cluster.storage)


def test_metadata_never_holds_a_placeholder(job: Job) -> None:
    snapshot = two_checkpoints(job)
    content = encode_metadata(snapshot.metadata)
    assert decode_metadata(content, "p") == snapshot.metadata
    part: StateHandle = PlaceholderHandle("../shared/1-1-op-0-n-000009.sst", 9)
    (operator,) = snapshot.metadata.operators
    keyed = msgspec.structs.replace(operator.subtasks[0].keyed[0], parts=(part,), names=("000009.sst",))
    broken = msgspec.structs.replace(operator, subtasks=(OperatorSubtaskState(keyed=(keyed,)),))
    with pytest.raises(InvalidConfigError, match="a placeholder that was never resolved"):
        encode_metadata(msgspec.structs.replace(snapshot.metadata, operators=(broken,)))


# ----------------------------------------------------------------------------------------------------------------- memory


def test_no_more_is_remembered_than_may_be_a_base() -> None:
    stored = StoredFiles()
    for number in range(1, 200):
        stored.remember(number, {})
    assert stored.checkpoints == (1, *range(200 - CHECKPOINTS_MAX, 200)), "the base, and the newest"
    assert stored.of_base(190) == {}
    assert stored.checkpoints == tuple(range(190, 200))
    stored.forget(195)
    assert 195 not in stored.checkpoints
    assert stored.of_base(500) == {}
    assert stored.checkpoints == ()

"""Small tables that share files: what is packed and what is not, who keeps a file, and what is left when one is damaged (J19)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.coordinator.ha.shared_state import SharedStateRegistry, UnresolvedError, shared_handles
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.errors import CorruptStateError, HoldfastError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorState,
    OperatorSubtaskState,
    PlaceholderHandle,
    SegmentHandle,
    StateHandle,
)
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.snapshot.parts import PACK_BYTES_MAX, PartsWriter, ProblemKind, read_part, read_parts, verify_file
from holdfast.statebackends.state import ValueStateDescriptor
from holdfast.statebackends.state_processor.contents import StoredSnapshot, check_contents
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.verify import verify_files
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import Operation, ReadFile, Storage, run_flow
from tests.statebackends.backend_harness import ALL, COUNT, MAX_PARALLELISM, TAGS, Cluster, contents, fill, owner
from tests.statebackends.test_increments import Job, read, write

TARGET = SnapshotTarget(
    3, "job/chk-3", "op-0-1-n", canonical=False, inline_threshold=10, shared_prefix="3-1-op-0-n", pack_threshold=100
)
KEYS = [f"user-{number}" for number in range(60)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    cluster = Cluster(tmp_path, "filesystem")
    yield Job(cluster, pack_threshold=1 << 20)
    cluster.close()


def segments(handles: Sequence[KeyedStateHandle]) -> list[SegmentHandle]:
    return [part for handle in handles for part in handle.parts if isinstance(part, SegmentHandle)]


# ------------------------------------------------------------------------------------------------------------------ writing


def test_small_tables_share_a_file_and_others_have_their_own(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "state")
    (tmp_path / "1.sst").write_bytes(b"s" * 20)
    writer = PartsWriter(TARGET)
    pieces = {f"t{number}": bytes([number]) * (10 + number) for number in range(5)}
    parts = {name: writer.add(data, name, is_shared=name != "t4") for name, data in pieces.items()}
    own = writer.add(b"x" * 40, "own", is_shared=True, packs=False)
    large, sst = writer.add(b"l" * 100, "large", is_shared=True), writer.add_file(str(tmp_path / "1.sst"), "1.sst", is_shared=True)
    inline = writer.add(b"i" * 9, "inline")
    run_flow(writer.store(), storage)
    packed = [parts[name].handle for name in ("t0", "t1", "t2", "t3")]
    assert packed == [
        SegmentHandle("../shared/3-1-op-0-n-pack-1", len(data), checksum_of(data), offset, 46)
        for data, offset in zip(list(pieces.values())[:4], (0, 10, 21, 33), strict=True)
    ]
    assert parts["t4"].handle == FileHandle("op-0-1-n-t4", 14, checksum_of(pieces["t4"])), "the only one of its kind"
    assert [part.handle.path for part in (own, large, sst) if isinstance(part.handle, FileHandle)] == [
        "../shared/3-1-op-0-n-own", "../shared/3-1-op-0-n-large", "../shared/3-1-op-0-n-1.sst"
    ]  # fmt: skip
    assert isinstance(inline.handle, InlineHandle)
    for name, part in parts.items():
        assert run_flow(read_part(part.handle, "job/chk-3"), storage) == pieces[name]
        assert isinstance(part.handle, FileHandle)
        assert run_flow(verify_file(part.handle, "job/chk-3", "op", 0), storage) is None


def test_a_file_of_several_has_a_bound_and_names_are_used_once(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "state")
    writer = PartsWriter(small_target(pack_threshold=PACK_BYTES_MAX))
    third = bytes(PACK_BYTES_MAX // 3)
    parts = [writer.add(third, str(number)) for number in range(4)]
    run_flow(writer.store(), storage)
    parts += [writer.add(b"a" * 20, "4"), writer.add(b"b" * 20, "5")]
    run_flow(writer.store(), storage)
    paths = [part.handle.path for part in parts if isinstance(part.handle, FileHandle)]
    assert paths == [*["op-0-1-n-pack-1"] * 3, "op-0-1-n-3", *["op-0-1-n-pack-2"] * 2]


def small_target(pack_threshold: int) -> SnapshotTarget:
    return SnapshotTarget(3, "job/chk-3", "op-0-1-n", False, 10, pack_threshold=pack_threshold)


# ----------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", ["filesystem", "rocksdb"])
def test_every_state_comes_back_from_packed_files(tmp_path: Path, kind: str) -> None:
    cluster = Cluster(tmp_path, kind)  # type: ignore[arg-type]
    backend = cluster.backend(ALL)
    fill([backend], KEYS, [b"", b"n"])
    expected = contents(backend, [b"", b"n"])
    for shared in ("", "1-1-op-0-n"):
        target = SnapshotTarget(1, f"job/chk-1{len(shared)}", "op-0-1-n", False, 0, shared, None, 1 << 20)
        pending = backend.snapshot(1)
        handles = run_flow(pending.flow(target), cluster.storage)
        pending.release()
        if kind == "filesystem":
            assert len({part.path for part in segments(handles)}) == 1
            assert len(segments(handles)) == len(ALL)
        assert not any(isinstance(part, SegmentHandle) for handle in handles if handle.format == "rocksdb" for part in handle.parts)
        for parallelism in (1, 2):
            found = {}
            for subtask in range(parallelism):
                restored = cluster.restored((handles, target.folder), ALL, parallelism=parallelism, subtask=subtask)
                found.update(contents(restored, [b"", b"n"]))
            assert found == expected
    cluster.close()


def test_increments_refer_to_pieces_of_what_the_base_has(job: Job) -> None:
    backends = [job.cluster.backend((COUNT, TAGS))]
    write(backends, range(300), 1)
    job.checkpoint(backends, 1, None)
    write(backends, range(20), 2)
    second = job.checkpoint(backends, 2, 1)
    placeholders = [part for handle in second for part in handle.parts if isinstance(part, PlaceholderHandle)]
    assert {(part.path, part.offset) for part in placeholders} == {(part.path, part.offset) for part in segments(job.completed[1])}
    assert len({part.path for part in segments(second)}) == 1, "both runs in one file"
    third = job.checkpoint(backends, 3, 2)
    assert not segments(third)
    assert read(job.restored(3)) == read(backends)
    again = job.restored(3)
    write(again, range(5), 7)
    fourth = job.checkpoint(again, 4, 3)
    assert {part.path for part in segments(job.completed[4])} > {part.path for part in segments(fourth)}, "it goes on with them"
    assert read(job.restored(4, 2)) == read(again)


THREE = tuple(ValueStateDescriptor(name, int) for name in ("a", "b", "c"))


def put(backend: KeyedBackendBase, number: int, names: str, value: int) -> None:
    for descriptor in THREE:
        if descriptor.name in names:
            owner([backend], f"key{number}").get_state(descriptor).update(value)


def values(backend: KeyedBackendBase) -> dict[tuple[str, str], int]:
    found = {}
    for descriptor in THREE:
        for key in list(backend.keys(descriptor.name)):
            name = backend.key_type.decode(key)
            owner([backend], name)
            found[descriptor.name, name] = backend.get_state(descriptor).value()
    return found


def test_j19_a_file_of_which_most_is_needed_by_nobody_is_given_up(job: Job) -> None:
    backend = job.cluster.backend(THREE)
    for number in range(2_000):
        put(backend, number, "abc", number)
    job.checkpoint([backend], 1, None)
    (first,) = {part.path for part in segments(job.completed[1])}
    for number in range(2_000):
        put(backend, number, "a", number + 1)
    job.checkpoint([backend], 2, 1)
    kept = [part for part in segments(job.completed[2]) if part.path == first]
    assert len(kept) == 2, "two thirds are needed: it stays"
    for number in range(2_000):
        put(backend, number, "b", number + 2)
    job.checkpoint([backend], 3, 2)
    assert any(part.path == first for part in segments(job.completed[3])), "found out when the next one is taken"
    fourth = job.checkpoint([backend], 4, 3)
    assert all(part.path != first for part in segments(job.completed[4]))
    assert [part for handle in fourth for part in handle.parts if not isinstance(part, PlaceholderHandle)], "c was written again"
    restored = job.cluster.backend(THREE)
    restored.restore(job.completed[4], job.cluster.storage, "job/chk-4", checkpoint_id=4)
    assert values(restored) == values(backend)


def test_a_savepoint_has_files_of_its_own(job: Job) -> None:
    backend = job.cluster.backend(THREE)
    put(backend, 1, "abc", 1)
    pending = backend.snapshot(1)
    target = SnapshotTarget(1, "savepoint-1", "op-0-1-n", True, 0)
    (handle,) = run_flow(pending.flow(target), job.cluster.storage)
    pending.release()
    assert [type(part) for part in handle.parts] == [FileHandle] * 3


# ------------------------------------------------------------------------------------------------------------------ reading


class Asked:
    """A storage that remembers what was read."""

    def __init__(self, storage: LocalStorage) -> None:
        self._storage = storage
        self.root = storage.root
        self.reads: list[tuple[str, int, int | None]] = []

    def at(self, location: str) -> Storage:
        return self._storage.at(location)

    def execute(self, operation: Operation) -> Any:
        assert isinstance(operation, ReadFile)
        self.reads.append((operation.path.rpartition("-")[2], operation.offset, operation.length))
        return self._storage.execute(operation)


def test_pieces_of_one_file_are_read_with_one_request_if_most_of_it_is_wanted(tmp_path: Path) -> None:
    storage = Asked(LocalStorage(tmp_path / "state"))
    writer = PartsWriter(TARGET)
    tables = [bytes([number]) * 20 for number in range(10)]
    packed = [writer.add(table, str(number)) for number, table in enumerate(tables)]
    own, inline = writer.add(b"o" * 30, "own", packs=False), writer.add(b"i", "inline")
    run_flow(writer.store(), LocalStorage(tmp_path / "state"))
    handles = [part.handle for part in packed]

    def of(*chosen: StateHandle) -> tuple[list[bytes], list[tuple[str, int, int | None]]]:
        storage.reads.clear()
        return run_flow(read_parts(chosen, "job/chk-3"), storage), sorted(storage.reads)

    mixed = [handles[7], own.handle, *handles[:7], inline.handle, *handles[8:]]
    assert of(*mixed) == ([tables[7], b"o" * 30, *tables[:7], b"i", *tables[8:]], [("1", 0, 200), ("own", 0, 31)])
    assert of(handles[3], handles[1]) == ([tables[3], tables[1]], [("1", 20, 60)]), "a hole of as much as is needed at most"
    assert of(handles[0], handles[9]) == ([tables[0], tables[9]], [("1", 0, 20), ("1", 180, 20)])
    assert of(handles[4], handles[4]) == ([tables[4]] * 2, [("1", 80, 20)])
    assert of() == ([], [])


# -------------------------------------------------------------------------------------------------------------- the registry


def segment(name: str, offset: int, length: int = 10) -> SegmentHandle:
    return SegmentHandle(f"../shared/{name}", length, "xxh3_128:" + "0" * 32, offset, 30)


def state_of(*parts: StateHandle) -> OperatorSubtaskState:
    return OperatorSubtaskState(keyed=(KeyedStateHandle(KeyGroupRange(0, 8), "arrow", (), parts),))


def test_j19_a_file_goes_with_the_last_checkpoint_that_has_a_piece_of_it() -> None:
    files = SharedStateRegistry()
    files.register(1, shared_handles([state_of(segment("1-a", 0), segment("1-a", 10)), state_of(segment("1-a", 20))]))
    files.register(2, shared_handles([state_of(segment("1-a", 20))]))
    assert files.counts() == {"1-a": (1, 2)}
    assert files.release(1).names == ()
    assert files.release(2).names == ("1-a",)


def test_a_placeholder_is_replaced_by_the_piece_that_it_names() -> None:
    files = SharedStateRegistry()
    whole = FileHandle("../shared/1-b", 5, "c")
    files.register(1, shared_handles([state_of(segment("1-a", 0), segment("1-a", 10, 20)), state_of(whole)]))

    def resolve(part: PlaceholderHandle) -> StateHandle:
        task = next(iter(files.resolve(2, 1, {None: {"op": state_of(part)}}).values()))  # type: ignore[dict-item]
        return task["op"].keyed[0].parts[0]

    assert resolve(PlaceholderHandle("../shared/1-a", 20, 10)) == segment("1-a", 10, 20)
    assert resolve(PlaceholderHandle("../shared/1-b", 5)) == whole
    for part in (
        PlaceholderHandle("../shared/1-a", 30),  # not the whole file
        PlaceholderHandle("../shared/1-a", 10, 20),
        PlaceholderHandle("../shared/1-b", 5, 0),
        PlaceholderHandle("../shared/1-a", 19, 10),
    ):
        with pytest.raises(UnresolvedError, match="1-"):
            resolve(part)


# ------------------------------------------------------------------------------------------------------------ tools, damage


def seen(job: Job, number: int) -> StoredSnapshot:
    """A completed checkpoint of one subtask, as tools see it."""
    subtasks = (OperatorSubtaskState(keyed=job.completed[number]),)
    operator = OperatorState("op", "f" * 32, "op", 1, MAX_PARALLELISM, subtasks)
    metadata = SnapshotMetadata(
        job_id="job", job_name="j", checkpoint_id=number, kind="checkpoint", attempt=1, epoch=1,
        trigger_timestamp_ms=0, completion_timestamp_ms=0, operators=(operator,),
    )  # fmt: skip
    return StoredSnapshot(metadata, job.cluster.storage, f"job/chk-{number}")


@pytest.fixture
def stored(job: Job) -> StoredSnapshot:
    """A checkpoint with packed tables and a packed delta on each."""
    backends = [job.cluster.backend((COUNT, TAGS))]
    write(backends, range(40), 1)
    job.checkpoint(backends, 1, None)
    write(backends, range(4), 2)
    job.checkpoint(backends, 2, 1)
    return seen(job, 2)


def test_tools_read_packed_tables_and_a_copy_has_files(job: Job, stored: StoredSnapshot, tmp_path: Path) -> None:
    check_contents(stored)
    report = run_flow(verify_files(stored), stored.storage)
    assert (report.files, report.is_sound) == (3, True)
    assert report.size == sum(handle.size for handle in job.completed[2])
    copied = copy_snapshot(stored, LocalStorage(tmp_path / "elsewhere"), "copy")
    files = [part for each in copied.metadata.operators for state in each.subtasks for keyed in state.keyed for part in keyed.parts]
    assert {type(part) for part in files} == {FileHandle}
    assert len({part.path for part in files if isinstance(part, FileHandle)}) == 4
    assert run_flow(verify_files(copied), copied.storage).is_sound
    assert diff_snapshots(stored, copied).is_same
    shutil.rmtree(tmp_path / "state")
    assert run_flow(verify_files(copied), copied.storage).is_sound


def test_a_flipped_bit_anywhere_in_a_packed_file_is_found_and_names_its_operator(job: Job, stored: StoredSnapshot) -> None:
    for path in sorted((job.cluster.root / "state/job/shared").iterdir()):
        data = path.read_bytes()
        for position in range(0, len(data), max(1, len(data) // 25)):
            path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
            (problem,) = run_flow(verify_files(stored), stored.storage).problems
            assert (problem.kind, problem.operator) == (ProblemKind.CHECKSUM, "op")
            assert problem.path == f"job/shared/{path.name}"
            with pytest.raises(CorruptStateError, match=path.name):
                job.restored(2)
        path.write_bytes(data)


def test_a_packed_file_that_is_cut_or_grown_or_gone_is_found(job: Job, stored: StoredSnapshot) -> None:
    for path in sorted((job.cluster.root / "state/job/shared").iterdir()):
        data = path.read_bytes()
        for content in (data[:-1], data[: len(data) // 2], b"", data + b"x"):
            path.write_bytes(content)
            problems = run_flow(verify_files(stored), stored.storage).problems
            assert {problem.kind for problem in problems} == {ProblemKind.LENGTH}
            for part in segments(job.completed[2]):
                if part.path.endswith(path.name):
                    with pytest.raises(CorruptStateError, match=path.name), stored.reader() as reader:
                        reader.read(part, operator="op", subtask=0)
        path.unlink()
        assert {problem.kind for problem in run_flow(verify_files(stored), stored.storage).problems} == {ProblemKind.MISSING}
        with pytest.raises(CorruptStateError, match="missing"):
            job.restored(2)
        path.write_bytes(data)


@pytest.mark.parametrize("change", [{"offset": -1}, {"offset": 10**9}, {"length": 10**9}, {"length": -5}, {"file_length": 3}])
def test_a_piece_that_is_not_in_its_file_is_refused(job: Job, stored: StoredSnapshot, change: dict[str, int]) -> None:
    first = job.completed[2][0]
    parts = (msgspec.structs.replace(first.parts[0], **change), *first.parts[1:])
    job.completed[3] = (msgspec.structs.replace(first, parts=parts), *job.completed[2][1:])
    hostile = seen(job, 3)
    with pytest.raises(CorruptStateError, match="is not in a file of"):
        check_contents(hostile)
    assert not run_flow(verify_files(hostile), hostile.storage).is_sound
    with pytest.raises(HoldfastError):
        job.restored(3)

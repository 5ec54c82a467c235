"""p -> p' -> p, and backend -> backend: keyed state of every kind, timers and operator state together keep their contents (R09,
R10, R17, I27, I28); savepoints move, native ones to their own backend alone (R14)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast.coordinator.restore.compatibility import check_compatibility
from holdfast.statebackends.errors import BackendMismatchError
from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.snapshot.metadata import NATIVE_PROPERTY, encode_metadata
from holdfast.statebackends.snapshot.parts import file_handles
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.verify import verify_files
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow
from tests.examples import examples
from tests.statebackends.roundtrip import graph_for, restored_at
from tests.statebackends.snapshot_harness import KINDS, SOME, Contents, write

MAX_PARALLELISM = 8
KEYS = st.sampled_from(["AA", "UA", "WN", "DL", "B6", "", "ключ", "k" * 40])
COUNTS = st.integers(-(2**53), 2**53)
LABELS = st.dictionaries(st.text(max_size=3), st.sets(st.text(max_size=2), max_size=3), max_size=2)
CONTENTS = st.builds(
    Contents,
    count=st.dictionaries(KEYS, COUNTS, max_size=6),
    labels=st.dictionaries(
        KEYS, st.dictionaries(st.text(max_size=3), st.sets(st.text(max_size=2), max_size=3), max_size=2), max_size=3
    ),
    seen=st.dictionaries(KEYS, st.lists(st.text(max_size=4), min_size=1, max_size=3), max_size=4),
    tags=st.dictionaries(KEYS, st.dictionaries(st.text(min_size=1, max_size=3), COUNTS, min_size=1, max_size=3), max_size=4),
    windows=st.dictionaries(st.tuples(KEYS, st.integers(0, 3).map(lambda n: n * 60)), COUNTS, max_size=5),
    timers=st.sets(st.tuples(KEYS, st.integers(-5, 5000)), max_size=6),
    positions=st.lists(st.tuples(st.text(max_size=3), st.integers(0, 99)).map(list), max_size=6),
    rules=st.lists(st.text(max_size=3), max_size=3),
)
PARALLELISMS = st.integers(1, MAX_PARALLELISM)


def assert_same(before: StoredSnapshot, after: StoredSnapshot) -> None:
    found = diff_snapshots(before, after, None, None, keys_max=3)
    assert found.is_same, found
    assert run_flow(verify_files(after), after.storage).is_sound


@example(contents=SOME, path=[(4, "memory"), (2, "rocksdb"), (8, "filesystem"), (4, "memory")], kind="memory", start=4)
@settings(max_examples=examples(3), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    contents=CONTENTS,
    path=st.lists(st.tuples(PARALLELISMS, st.sampled_from(KINDS)), min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    start=PARALLELISMS,
)
def test_r09_r10_i28_contents_are_equal_after_any_way_through_parallelisms_and_backends(
    tmp_path: Path, contents: Contents, path: list[tuple[int, BackendKind]], kind: BackendKind, start: int
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    first = write(root, "savepoint-0", contents, kind=kind, parallelism=start, max_parallelism=MAX_PARALLELISM, canonical=True)
    last = first
    for parallelism, backend in [*path, (start, kind)]:
        last = restored_at(root, last, backend, parallelism)
        assert len(last.metadata.operators[0].subtasks) == parallelism
        assert_same(first, last)


@settings(max_examples=examples(2), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(contents=CONTENTS, kind=st.sampled_from(KINDS), start=PARALLELISMS, other=PARALLELISMS)
def test_r17_native_files_keep_their_contents_through_another_parallelism_on_their_own_backend(
    tmp_path: Path, contents: Contents, kind: BackendKind, start: int, other: int
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    first = write(root, "job/chk-7", contents, kind=kind, parallelism=start, max_parallelism=MAX_PARALLELISM)
    between = restored_at(root, first, kind, other, canonical=False)
    assert_same(first, between)
    assert_same(first, restored_at(root, between, kind, start, canonical=False))


def native(root: Path, kind: BackendKind) -> StoredSnapshot:
    """A native savepoint, moved away from where it was taken."""
    first = write(root, "savepoint-7", SOME, kind=kind, parallelism=2, max_parallelism=MAX_PARALLELISM)
    metadata = msgspec.structs.replace(first.metadata, kind="savepoint", properties={NATIVE_PROPERTY: kind})
    moved = root / "elsewhere" / "moved"
    shutil.move(root / "state" / "savepoint-7", moved)
    (moved / "_metadata").write_bytes(encode_metadata(metadata))
    return StoredSnapshot(metadata, LocalStorage(root / "elsewhere"), "moved")


@pytest.mark.parametrize("kind", KINDS)
def test_r14_r17_a_native_savepoint_moves_and_restores_on_its_own_backend_and_is_refused_on_another(
    tmp_path: Path, kind: BackendKind
) -> None:
    moved = native(tmp_path, kind)
    (operator,) = moved.metadata.operators
    formats = {handle.format for subtask in operator.subtasks for handle in subtask.keyed}
    assert ("rocksdb" in formats) == (kind == "rocksdb")
    assert "parquet" not in formats
    names = [handle.path for subtask in operator.subtasks for handle in file_handles(subtask)]
    assert names or kind == "memory"
    assert not any("/" in name for name in names), "self-contained"
    reference = write(tmp_path, "savepoint-9", SOME, parallelism=2, max_parallelism=MAX_PARALLELISM, canonical=True)
    assert_same(reference, restored_at(tmp_path, moved, kind, 3))
    heap = {"memory", "filesystem"}
    for other in KINDS:
        fits = other == kind or {kind, other} == heap
        refusals = check_compatibility(moved.metadata, graph_for(moved, 3, other)).refusals
        assert [refusal.kind for refusal in refusals] == ([] if fits else ["BackendMismatchError"]), (kind, other)
        if not fits:
            error = refusals[0].error()
            assert isinstance(error, BackendMismatchError)
            assert (error.operator, error.stored, error.requested) == ("totals", kind, other)


def test_r14_a_canonical_savepoint_moves_to_another_place(tmp_path: Path) -> None:
    first = write(tmp_path, "savepoint-7", SOME, kind="rocksdb", parallelism=2, canonical=True)
    reference = write(tmp_path, "savepoint-8", SOME, parallelism=2, canonical=True)
    moved = tmp_path / "elsewhere" / "deep" / "moved"
    moved.parent.mkdir(parents=True)
    shutil.move(tmp_path / "state" / "savepoint-7", moved)
    for kind in KINDS:
        assert_same(reference, restored_at(tmp_path, first, kind, 3, location=str(moved)))

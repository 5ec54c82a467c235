"""Files that a snapshot needs outside its folder: each asked of the storage that its path names, or told with a reason."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.snapshots import find_missing_external
from holdfast.operators.sources.materialised import ChunkFile, InputManifest, make_manifest
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.parts import FILES_AT_ONCE, ProblemKind
from holdfast.statebackends.state_processor.external import NO_DIRECTORY, ExternalReport, UncheckedFile, check_external
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import Operation, PutIfAbsent, Storage, WriteFile, run_flow

JOB = "ab" * 16
SCHEMA = pa.schema([pa.field("id", pa.int64())])
CHUNKS = {"w-1/0.arrow": b"a" * 5_000_000, "w-1/1.arrow": b"b" * 10, "w-1/2.arrow": b""}
"""The first one is read in several pieces."""


@pytest.fixture
def state(tmp_path: Path) -> LocalStorage:
    storage = open_storage(str(tmp_path / "state"))
    assert isinstance(storage, LocalStorage)
    return storage


def check(state: Storage, *entries: str, relative: bool = True) -> ExternalReport:
    return run_flow(check_external(entries, relative=relative), RoutedStorage(state))


def found(report: ExternalReport) -> list[tuple[str, str]]:
    return [(problem.kind.value, problem.path) for problem in report.problems]


@pytest.fixture
def sink(tmp_path: Path) -> tuple[str, str]:
    """Where a staged file is, and where it will be once it is committed."""
    folder = tmp_path / "out" / "_holdfast" / "out"
    for name in ("staged", "data"):
        (folder / name).mkdir(parents=True)
    pq.write_table(pa.table({"id": [1, 2]}), folder / "staged" / "part-0.parquet")
    return str(folder / "staged" / "part-0.parquet"), str(folder / "data" / "part-0.parquet")


def test_a_staged_file_is_found_where_it_is_and_where_its_commit_puts_it(state: LocalStorage, sink: tuple[str, str]) -> None:
    staged, data = sink
    nothing = ExternalReport((), ())
    for relative in (True, False):
        assert check(state, f"{staged}|{data}", f"file://{staged}|file://{data}", relative=relative) == nothing
    Path(staged).rename(data)
    assert check(state, f"{staged}|{data}", relative=False) == nothing
    Path(data).unlink()
    report = check(state, f"{staged}|{data}", f"{staged}|{data}")
    assert found(report) == [("missing", f"{staged}|{data}")], "named twice, told once"


@pytest.mark.parametrize("size", [0, 3, 100])
def test_a_staged_file_that_was_cut_is_a_problem(state: LocalStorage, sink: tuple[str, str], size: int) -> None:
    staged, data = sink
    content = Path(staged).read_bytes()
    for place in (staged, data):
        Path(staged).unlink(missing_ok=True)
        Path(place).write_bytes(content[:size])
        report = check(state, f"{staged}|{data}")
        assert found(report) == [("format", place)]
        assert "it was cut" in report.problems[0].detail


def write_input(state: LocalStorage) -> str:
    files = [ChunkFile(name, 0, 1, len(content), checksum_of(content)) for name, content in CHUNKS.items()]
    path = JobPaths(JOB).input_manifest("src", 1)
    for name, content in CHUNKS.items():
        state.execute(WriteFile(f"{path.rpartition('/')[0]}/{name}", [content]))
    state.execute(PutIfAbsent(path, msgspec.json.encode(make_manifest(SCHEMA, files, "w-1"))))
    return path


def test_an_input_is_checked_file_by_file(state: LocalStorage) -> None:
    path = write_input(state)
    folder = path.rpartition("/")[0]
    assert check(state, path) == ExternalReport((), ())
    assert check(state, path, relative=False) == ExternalReport((), (UncheckedFile(path, NO_DIRECTORY),))
    below = Path(state.root) / folder
    (below / "w-1/0.arrow").write_bytes(b"x" + CHUNKS["w-1/0.arrow"][1:])
    (below / "w-1/1.arrow").write_bytes(b"b")
    (below / "w-1/2.arrow").unlink()
    names = ["checksum", "length", "missing"]
    assert found(check(state, path)) == [(kind, f"{folder}/w-1/{number}.arrow") for number, kind in enumerate(names)]


def test_a_manifest_that_cannot_be_read_is_a_problem_and_a_newer_one_is_not_judged(state: LocalStorage) -> None:
    path = write_input(state)
    place = Path(state.root) / path
    manifest = msgspec.json.decode(place.read_bytes(), type=InputManifest)
    place.write_bytes(b'{"version":1,"files":[{}]}')
    assert found(check(state, path)) == [("format", path)]
    place.write_bytes(b"\xff")
    assert found(check(state, path)) == [("format", path)]
    place.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, version=2)))
    (unchecked,) = check(state, path).unchecked
    assert (unchecked.path, unchecked.reason) == (path, "input manifest version 2, this Holdfast reads 1")
    hostile = ChunkFile("../../../../../other", 0, 1, 1, checksum_of(b"x"))
    place.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, files=(hostile,))))
    assert found(check(state, path)) == [(ProblemKind.PATH.value, hostile.name)]


def test_what_cannot_be_asked_is_told_with_the_reason(
    state: LocalStorage, sink: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    reasons = {
        "gs://bucket/staged/a|gs://bucket/data/a": "storage scheme 'gs' is not supported",
        "s3://bucket/staged/a.parquet|s3://bucket/data/a.parquet": "boto3",
    }
    report = check(state, *reasons, "|".join(sink), "/no/such/folder/a")
    assert found(report) == [("missing", "/no/such/folder/a")]
    assert [each.path for each in report.unchecked] == list(reasons)
    for each in report.unchecked:
        assert reasons[each.path] in each.reason


class Failing:
    """A storage whose other places are away."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self.root = storage, storage.root

    def at(self, location: str) -> Storage:
        return Failing(self._storage.at(location))

    def execute(self, operation: Operation) -> Any:
        raise StorageUnavailableError(f"{self.root}: no route to host")


@pytest.mark.parametrize("entry", ["/a/../b", "a/../b", "../b", "./b", "/a\0b/c", "", "a|", "s3://bucket/../a"])
def test_what_is_no_path_is_a_problem(state: LocalStorage, entry: str) -> None:
    assert found(check(state, entry)) == [("path", entry)]


def test_storage_that_fails_is_told_and_the_others_are_checked(state: LocalStorage, sink: tuple[str, str]) -> None:
    report = run_flow(check_external(["|".join(sink), "x"]), RoutedStorage(Failing(state)))
    assert not report.problems
    assert [each.path for each in report.unchecked] == ["|".join(sink), "x"]
    assert all("no route to host" in each.reason for each in report.unchecked)


def test_many_are_looked_at(state: LocalStorage, tmp_path: Path) -> None:
    entries = [f"{tmp_path}/{number}/file" for number in range(2 * FILES_AT_ONCE + 1)]
    for entry in entries[::2]:
        Path(entry).parent.mkdir()
        Path(entry).write_bytes(b"x")
    assert found(check(state, *entries)) == [("missing", entry) for entry in entries[1::2]]


def test_without_contents_it_is_enough_that_a_file_is_there(state: LocalStorage, tmp_path: Path) -> None:
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(b"rows")
    state.execute(PutIfAbsent("job/sources/s/1/manifest.json", b"no manifest"))
    entries = (str(cut), "job/sources/s/1/manifest.json", "gone", "../leaves")
    report = run_flow(check_external(entries, contents=False), RoutedStorage(state))
    assert found(report) == [("missing", "gone"), ("path", "../leaves")]
    assert [kind for kind, _ in found(check(state, *entries))] == ["format", "format", "missing", "path"]


def test_what_a_start_can_not_ask_of_is_no_answer(state: LocalStorage) -> None:
    """It raises what storage did, so that one that passes is tried again."""

    class Failing:
        root = state.root

        def at(self, location: str) -> Storage:
            return self

        def execute(self, operation: Operation) -> Any:
            raise StorageUnavailableError("no answer", path="x")

    with pytest.raises(StorageUnavailableError, match="no answer"):
        run_flow(find_missing_external(["x"]), Failing())

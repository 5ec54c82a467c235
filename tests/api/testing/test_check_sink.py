"""The conformance kit: the target of docs/writing-a-connector.md passes, and one with a mistake does not."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.sinks.files.parquet import read_committed
from holdfast.statebackends.storage.port import PutIfAbsent
from tests.api.test_page_examples import block, executed

PAGE = "docs/writing-a-connector.md"
Target: Any = executed(block(PAGE, "class SqliteTarget"))["SqliteTarget"]
Target.__module__ = __name__
SqliteTarget = Target
"""Pickled by its name here."""


def make(folder: Path, target: Callable[..., Any]) -> Callable[[str], hf.StagedSink]:
    def make_sink(name: str) -> hf.StagedSink:
        with sqlite3.connect(folder / f"{name}.db") as db:
            db.execute("CREATE TABLE rows (id INTEGER, text TEXT)")
        return hf.StagedSink(target(folder / f"{name}.db", "rows"))

    return make_sink


def read(folder: Path) -> Callable[[str], list[tuple[int, str | None]]]:
    def read_rows(name: str) -> list[tuple[int, str | None]]:
        with sqlite3.connect(folder / f"{name}.db") as db:
            return list(db.execute("SELECT id, text FROM rows ORDER BY rowid"))

    return read_rows


def test_the_target_of_the_page_passes(tmp_path: Path) -> None:
    page = executed(block(PAGE, "def test_sqlite_target"), SqliteTarget=SqliteTarget)
    page["test_sqlite_target"](tmp_path)


class NeverCompares(Target):
    """A late owner writes on."""

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        super().apply(batches, self.stored(expected.sink_id), position)


class NeverTakes(Target):
    """`open` reads the position, and fences nobody."""

    def store(self, position: hf.CommitPosition) -> None:
        if position.row == -1 and position.checkpoint_id == 0:
            super().store(position)


class Begins(Target):
    """`open` forgets what is stored."""

    def stored(self, sink_id: str) -> hf.CommitPosition | None:
        return None if self.opens else super().stored(sink_id)

    opens = False

    def open(self, owner: hf.CommitOwner) -> hf.CommitPosition:
        self.opens = True
        try:
            position: hf.CommitPosition = super().open(owner)
            return position
        finally:
            self.opens = False


class TwoSteps(Target):
    """Rows in one step, the position in the next."""

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        if self.stored(expected.sink_id) != expected:
            raise hf.FencedError("another owner")
        for batch in batches:
            self.db.executemany("INSERT INTO rows VALUES (?, ?)", zip(*(c.to_pylist() for c in batch.columns), strict=True))
        self.store(position)


class DropsEmptyTexts(Target):
    """Takes an empty text for null."""

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        def changed() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield pa.RecordBatch.from_pylist([{**row, "text": row["text"] or None} for row in batch.to_pylist()])

        super().apply(changed(), expected, position)


class TakesHalf(Target):
    """Returns before it took all rows."""

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        super().apply(iter([next(batches)]), expected, position)


class LooksBefore(Target):
    """Compares before its transaction, which then writes whatever has happened meanwhile."""

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        if self.stored(expected.sink_id) != expected:
            raise hf.FencedError("another owner")
        rows = [row for batch in batches for row in zip(*(c.to_pylist() for c in batch.columns), strict=True)]
        with self.transaction():
            self.db.executemany("INSERT INTO rows VALUES (?, ?)", rows)
            self.store(position)


class ForgetsToClose(Target):
    """Leaves a transaction open, which holds up all others, once it has committed."""

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        super().apply(batches, expected, position)
        self.db.execute("BEGIN IMMEDIATE")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self.db.in_transaction:
            self.db.execute("COMMIT")
        with super().transaction():
            yield


MISTAKES: dict[type[Any], str] = {
    LooksBefore: "was not refused, though its successor had opened",
    NeverCompares: "owner that was replaced was not refused",
    NeverTakes: "CommitPositionLostError",
    Begins: "CommitPositionLostError",
    TwoSteps: "rows",
    DropsEmptyTexts: "expected 3",
    TakesHalf: "expected 3",
}


def locked(folder: Path) -> Callable[[str], list[str]]:
    """Whether somebody holds the lock of an output."""

    def nothing_open(name: str) -> list[str]:
        with sqlite3.connect(folder / f"{name}.db", timeout=0, isolation_level=None) as db:
            try:
                db.execute("BEGIN IMMEDIATE")
                db.execute("ROLLBACK")
            except sqlite3.OperationalError as error:
                return [str(error)]
        return []

    return nothing_open


def test_what_is_open_between_two_checkpoints_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.api.testing.connectors.QUIET_TIMEOUT_S", 0.05)
    with pytest.raises(AssertionError, match=r"is open at the server between two checkpoints: .*locked"):
        hf.testing.check_sink(make(tmp_path, ForgetsToClose), read(tmp_path), nothing_open=locked(tmp_path))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_target_with_a_mistake_does_not(mistake: type[Any], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(MISTAKES[mistake])):
        hf.testing.check_sink(make(tmp_path, mistake), read(tmp_path))


@pytest.mark.endurance
@pytest.mark.timeout(900)
def test_the_target_of_the_page_passes_at_all_points(tmp_path: Path) -> None:
    passed = hf.testing.check_sink(make(tmp_path, SqliteTarget), read(tmp_path), nothing_open=locked(tmp_path), points="all")
    assert len(passed) > 80


@pytest.mark.parametrize("point", [3, 4])
def test_a_process_may_die_at_the_end_of_its_rows_and_behind_its_call(point: int, tmp_path: Path) -> None:
    scenario = f"SIGKILL behind row {point} of a process that commits"
    assert scenario in hf.testing.check_sink(make(tmp_path, SqliteTarget), read(tmp_path), only=scenario)


def test_a_process_may_stop_at_the_end_of_its_rows(tmp_path: Path) -> None:
    scenario = "SIGSTOP behind row 3 of a process that commits"
    assert scenario in hf.testing.check_sink(make(tmp_path, SqliteTarget), read(tmp_path), only=scenario)


def test_a_failure_names_the_scenario_that_runs_again(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    with pytest.raises(AssertionError, match=r"scenario: ") as failure:
        hf.testing.check_sink(make(tmp_path / "all", TwoSteps), read(tmp_path / "all"))
    found = re.search(r"only='([^']*)'", str(failure.value))
    assert found is not None
    (tmp_path / "one").mkdir()
    with pytest.raises(AssertionError, match=re.escape(found[1])):
        hf.testing.check_sink(make(tmp_path / "one", TwoSteps), read(tmp_path / "one"), only=found[1])


def test_the_scenarios_are_told(tmp_path: Path) -> None:
    passed = hf.testing.check_sink(make(tmp_path, SqliteTarget), read(tmp_path), only="dies behind call 1, apply")
    assert passed == ["nothing fails", "dies behind call 1, apply"]


def test_a_scenario_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hf.InvalidConfigError, match="no scenario 'dies somewhere'"):
        hf.testing.check_sink(make(tmp_path, SqliteTarget), read(tmp_path), only="dies somewhere")
    with pytest.raises(hf.InvalidConfigError, match="points"):
        hf.testing.check_sink(make(tmp_path, SqliteTarget), read(tmp_path), points="few")  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- a writer and a committer


class Folder(hf.Sink):
    """Stages rows as JSON, one file a commit, and commits by a rename."""

    def __init__(self, path: Path, committer: type[hf.Committer]) -> None:
        self.path = path
        self.committer = committer

    def create_writer(self, schema: pa.Schema | None) -> hf.SinkWriter:
        return FolderWriter(self.path)

    def create_committer(self) -> hf.Committer:
        return self.committer(self.path)  # type: ignore[call-arg]


class FolderWriter(hf.SinkWriter):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Any] = []
        self.prepared: dict[str, list[Any]] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += [list(row.values()) for row in batch.to_pylist()]

    def prepare_commit(self) -> list[bytes]:
        if not self.rows:
            return []
        name = f"{self.rows[0][0]:06d}"
        self.prepared[name], self.rows = self.rows, []
        return [name.encode()]

    def flush(self, *, end_of_input: bool) -> None:
        for name, rows in self.prepared.items():
            (self.path / f"{name}.staged").write_text(json.dumps(rows))
        self.prepared.clear()


class Renames(hf.Committer):
    def __init__(self, path: Path) -> None:
        self.path = path

    def commit(self, requests: Sequence[hf.CommitRequest]) -> None:
        for request in requests:
            staged = self.path / f"{request.committable.decode()}.staged"
            if staged.exists():
                staged.rename(staged.with_suffix(""))
            else:
                request.already_committed()


class Appends(Renames):
    """Can't be repeated."""

    def commit(self, requests: Sequence[hf.CommitRequest]) -> None:
        with (self.path / "all").open("a") as out:
            for request in requests:
                out.write((self.path / f"{request.committable.decode()}.staged").read_text() + "\n")


def check_folder(folder: Path, committer: type[hf.Committer], **how: Any) -> list[str]:
    def make_sink(name: str) -> Folder:
        (folder / name).mkdir()
        return Folder(folder / name, committer)

    def read_rows(name: str) -> list[tuple[int, str | None]]:
        files = [file for file in sorted((folder / name).iterdir()) if not file.suffix]
        return [tuple(row) for file in files for line in file.read_text().splitlines() for row in json.loads(line)]

    return hf.testing.check_sink(make_sink, read_rows, **how)


def test_a_writer_with_a_committer_passes(tmp_path: Path) -> None:
    passed = check_folder(tmp_path, Renames)
    for call in ("open writer", "write", "prepare_commit", "flush", "open committer", "commit", "close writer", "close committer"):
        tried = [scenario.split(" call ")[0] for scenario in passed if scenario.endswith(f", {call}")]
        assert tried == ["dies before", "dies behind", "fails before", "fails behind"], call


def test_a_commit_that_can_not_be_repeated_does_not(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rows are there twice"):
        check_folder(tmp_path, Appends)


def test_a_sink_whose_calls_can_not_be_watched_is_refused() -> None:
    with pytest.raises(hf.InvalidConfigError, match="Blackhole is none of them"):
        hf.testing.check_sink(lambda name: hf.Blackhole(), lambda name: [])


# ------------------------------------------------------------------------------------------------------------------- file sinks


def read_files(folder: Path) -> Callable[[str], list[tuple[int, str | None]]]:
    def read_rows(name: str) -> list[tuple[int, str | None]]:
        try:
            return [(row["id"], row["text"]) for row in read_committed(folder / name).to_pylist()]
        except hf.NotFoundError:
            return []

    return read_rows


def check_files(folder: Path, settings: dict[str, Any] | None = None, **how: Any) -> list[str]:
    return hf.testing.check_sink(lambda name: hf.FileSink(folder / name, **(settings or {})), read_files(folder), **how)


@pytest.mark.parametrize(
    "scenario", ["a savepoint of another job", "two state directories, one name", "fails behind call 3, PutIfAbsent in log"]
)
def test_a_file_sink_passes(tmp_path: Path, scenario: str) -> None:
    assert scenario in check_files(tmp_path, only=scenario)


@pytest.mark.endurance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("settings", [{}, {"format": "json"}, {"format": "csv", "file_size_max": 1}], ids=repr)
def test_file_sinks_pass_at_every_change_of_their_storage(tmp_path: Path, settings: dict[str, Any]) -> None:
    passed = check_files(tmp_path, points="all", settings=settings)
    changes = ("PutIfAbsent in log", "WriteFile in staged", "LinkFile in data", "LinkFile in the folder", "DeleteFile in staged")
    for change in changes:
        tried = {scenario.split(" call ")[0] for scenario in passed if scenario.endswith(f", {change}")}
        assert tried == {"dies before", "dies behind", "fails before", "fails behind"}, change


class LosesCommits:
    """Storage that says of an entry of the log that it is there, and it is not."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def execute(self, operation: Any) -> Any:
        if isinstance(operation, PutIfAbsent) and "/log/" in operation.path and b'"commit"' in operation.data:
            return True
        return self.storage.execute(operation)


def test_a_file_sink_whose_log_loses_an_entry_does_not(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"expected 3"):
        hf.testing.check_sink(lambda name: hf.FileSink(tmp_path / name).watched(LosesCommits), read_files(tmp_path))

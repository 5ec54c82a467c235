"""Streaming inputs without Spark: what seals, reads and drops their batches."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from holdfast.operators.sources import stream_input as si
from holdfast.operators.sources.dataframe_write import _encode
from holdfast.operators.sources.materialised import ChunkFile, checksum_of, seal_flow
from holdfast.operators.sources.spark_checkpoint import frozen_settings, query_id_of
from holdfast.operators.sources.stream import StreamReader, StreamSource, decode_stream_positions
from holdfast.statebackends.errors import CorruptStateError, InputChangedError, UnsupportedVersionError
from holdfast.statebackends.handles import OperatorState
from holdfast.statebackends.layout import StreamPaths, batch_of_manifest, is_input_manifest
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.port import DeleteFolder, WriteFile, run_flow
from tests.operators.ports import DictStorage, ManualContext

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
FOLDER = "job-a/sources/src/000001"
PATHS = StreamPaths(FOLDER)


def source(schema: pa.Schema = SCHEMA, submission: int = 1, *, whole_batches: bool = False) -> StreamSource:
    """As it is behind the pickling: there is no Spark here."""
    found = StreamSource.__new__(StreamSource)
    found.__dict__ |= {"name": "stream", "folder": FOLDER, "submission": submission, "columns_read": None}
    found.__dict__ |= {"_schema": schema, "_dataframe": None, "base": None, "follows_base": True, "whole_batches": whole_batches}
    return found


class Input:
    """A streaming input with numbered rows."""

    def __init__(self, schema: pa.Schema = SCHEMA) -> None:
        self.storage, self.schema = DictStorage(), schema
        self.rows = self.batches = 0
        run_flow(si.make_stream_flow(FOLDER, schema, "src"), self.storage)
        run_flow(si.claim_input_flow(FOLDER, "job-a", 1, "n"), self.storage)

    def write(self, rows: int, *, batch_id: int, first_row: int, writer: str = "w", chunk_rows: int = 4) -> si.BatchManifest:
        files = []
        for start in range(0, rows, chunk_rows):
            numbers = range(first_row + start, first_row + min(rows, start + chunk_rows))
            values: dict[str, Any] = {"n": list(numbers), "text": [f"{writer} {n}" for n in numbers]}
            data = _encode(pa.table({name: values[name] for name in self.schema.names}, schema=self.schema))
            name = f"{writer}/{start}.arrow"
            self.storage.files[f"{PATHS.batch(batch_id)}/{name}"] = data
            files.append(ChunkFile(name, 0, len(numbers), len(data), checksum_of(data)))
        return si.make_batch_manifest(self.schema, files, writer, batch_id=batch_id, first_row=first_row, query_id="q")

    def seal(self, rows: int) -> None:
        manifest = self.write(rows, batch_id=self.batches, first_row=self.rows)
        run_flow(seal_flow(PATHS.manifest(self.batches), manifest), self.storage)
        self.batches, self.rows = self.batches + 1, self.rows + rows

    def end(self, submission: int = 1) -> None:
        last = run_flow(si.last_batch_flow(FOLDER), self.storage)
        batches, rows = (0, 0) if last is None else (last.batch_id + 1, last.end_row)
        run_flow(si.end_stream_flow(FOLDER, "job-a", submission, batches, rows), self.storage)

    def reader(self, subtask: int = 0, parallelism: int = 1, entries: list[bytes] | None = None, **of: Any) -> Reading:
        return Reading(self.storage, source(**of), subtask, parallelism, entries)


class Reading:
    """One reader, and what it gave."""

    def __init__(self, storage: DictStorage, of: StreamSource, subtask: int, parallelism: int, entries: list[bytes] | None) -> None:
        self.context = ManualContext(storage, uid="src", subtask=subtask, parallelism=parallelism)
        self.reader: StreamReader = of.create_reader(subtask, parallelism, 8)
        self.reader.open(self.context, entries)
        self.found: list[int] = []
        self.finished = False

    def step(self, rows_max: int = 100) -> None:
        self.context.run_pool()
        poll = self.reader.poll(rows_max, self.context.time_ms)
        self.finished = poll.finished
        if poll.batch is not None:
            self.found += [row["n"] for row in poll.batch.rows()]
        self.context.time_ms = max(self.context.time_ms, poll.ready_at_ms or 0)

    def read(self, rows: int | None = None, steps: int = 200) -> list[int]:
        """To the end, or these rows, or until nothing comes."""
        began = len(self.found)
        for _ in range(steps):
            if self.finished or (rows is not None and len(self.found) - began >= rows):
                break
            self.step(100 if rows is None else rows - len(self.found) + began)
        return self.found[began:]


def test_readers_follow_the_batches_in_order_and_end_with_the_query() -> None:
    given = Input()
    reading = given.reader()
    assert reading.read(steps=5) == []
    given.seal(10)
    assert reading.read(10) == list(range(10))
    given.seal(0)
    given.seal(7)
    assert reading.read(7) == list(range(10, 17))
    assert reading.read(steps=5) == []
    assert not reading.finished
    given.end()
    assert reading.read() == []
    assert reading.finished


@pytest.mark.parametrize("parallelism", [1, 2, 3, 8])
def test_rows_are_striped_over_all_batches(parallelism: int) -> None:
    given = Input()
    for rows in (1, 9, 0, 30, 2):
        given.seal(rows)
    given.end()
    parts = [given.reader(subtask, parallelism).read() for subtask in range(parallelism)]
    for subtask, part in enumerate(parts):
        assert part == [n for n in range(42) if n % 8 % parallelism == subtask]


@pytest.mark.parametrize("seed", range(12))
def test_each_row_is_read_once_over_restores_and_rescales(seed: int) -> None:
    draw = random.Random(seed)
    given = Input()
    kept: list[int] = []
    entries: list[bytes] | None = None
    for attempt in range(1, 9):
        parallelism = draw.choice([1, 2, 3, 5])
        parts = [entries[subtask::parallelism] if entries is not None else None for subtask in range(parallelism)]
        readings = [given.reader(subtask, parallelism, parts[subtask], submission=attempt) for subtask in range(parallelism)]
        for _ in range(draw.randrange(4)):
            given.seal(draw.choice([0, 1, 5, 23]))
        if attempt == 8:
            given.end(submission=8)
        for _ in range(20):
            draw.choice(readings).step(draw.choice([1, 3, 100]))
        if attempt == 8:
            for reading in readings:
                reading.read()
        if attempt == 8 or draw.random() < 0.7:  # else all of it is lost, and read again
            entries = [entry for reading in readings for entry in reading.reader.snapshot()]
            kept += [n for reading in readings for n in reading.found]
    assert sorted(kept) == list(range(given.rows))


def test_the_first_seal_of_a_batch_id_counts() -> None:
    given = Input()
    first = given.write(3, batch_id=0, first_row=0, writer="first")
    second = given.write(9, batch_id=0, first_row=0, writer="second")
    assert run_flow(seal_flow(PATHS.manifest(0), first), given.storage) == first
    assert run_flow(seal_flow(PATHS.manifest(0), second), given.storage) == first
    assert not any("/second/" in path for path in given.storage.files), "what lost is deleted"
    assert given.reader().read(3) == [0, 1, 2]


def test_snapshots_name_the_batch_that_they_need() -> None:
    given = Input()
    reading = given.reader()
    assert reading.reader.external_files() == (PATHS.record,)
    for rows in (4, 4, 4):
        given.seal(rows)
    reading.read(4)
    assert reading.reader.external_files() == (PATHS.manifest(0),), "the last one that was read, while no row of the next was"
    reading.read(1)
    assert reading.reader.external_files() == (PATHS.manifest(1),)
    reading.read(7)
    assert reading.reader.external_files() == (PATHS.manifest(2),)
    for path in list(given.storage.files):
        if path.startswith((PATHS.batch(0), PATHS.batch(1))):
            del given.storage.files[path]
    heir = given.reader(entries=reading.reader.snapshot())
    given.seal(2)
    assert heir.read(2) == [12, 13]


def test_paths_of_manifests() -> None:
    path = PATHS.manifest(7)
    assert path == f"{FOLDER}/batches/000000000007/manifest.json"
    assert is_input_manifest(path)
    assert batch_of_manifest(path) == (FOLDER, 7)
    assert batch_of_manifest(PATHS.record) is None
    assert batch_of_manifest(f"{FOLDER}/manifest.json") is None


# ------------------------------------------------------------------------------------------------- whole batches, copies


def test_whole_batches_are_cut_between_two_of_them_alone() -> None:
    given = Input()
    reading = given.reader(whole_batches=True)
    assert reading.reader.may_cut, "nothing is known"
    for rows in (3, 0, 5):
        given.seal(rows)
    cuts = {0}
    for _ in range(60):
        reading.step(1)
        if reading.reader.may_cut:
            cuts.add(len(reading.found))
    assert len(reading.found) == 8
    assert cuts == {0, 3, 8}
    assert given.reader().reader.may_cut


stream_seal: Any = seal_flow
COPY = "job-b/sources/src/000004"


class Fork(RuleBasedStateMachine):
    """A query, its reader, checkpoints, crashes, and savepoints that go on in a new folder: what is committed is whole batches, and
    each row once."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = DictStorage()
        self.folders = [FOLDER]
        self.base: si.StreamBase | None = None
        self.ends = [0]
        """Rows behind each batch."""
        self.next_id = 0
        run_flow(si.make_stream_flow(FOLDER, SCHEMA, "src"), self.storage)
        self.entries: list[bytes] | None = None
        self.committed: list[int] = []
        self.attempt()

    def attempt(self) -> None:
        folder = self.folders[-1]
        of = source()
        of.__dict__ |= {"folder": folder, "base": self.base, "whole_batches": True}
        self.reading = Reading(self.storage, of, 0, 1, self.entries)

    @rule(rows=st.sampled_from([0, 1, 4, 9]))
    def seal(self, rows: int) -> None:
        paths = StreamPaths(self.folders[-1])
        first = self.ends[-1]
        table = pa.table({"n": range(first, first + rows), "text": ["x"] * rows}, schema=SCHEMA)
        data = _encode(table)
        files = [ChunkFile("w/0", 0, rows, len(data), checksum_of(data))] if rows else []
        if rows:
            self.storage.files[f"{paths.batch(self.next_id)}/w/0"] = data
        manifest = si.make_batch_manifest(SCHEMA, files, "w", batch_id=self.next_id, first_row=first, query_id="q")
        run_flow(seal_flow(paths.manifest(self.next_id), manifest), self.storage)
        self.ends.append(first + rows)
        self.next_id += 1

    @precondition(lambda self: self.next_id > (0 if self.base is None else self.base.batch_id + 1))
    @rule(rows=st.sampled_from([0, 2, 6]))
    def seal_again(self, rows: int) -> None:
        """Spark computes the last batch once more, with other rows."""
        paths, first = StreamPaths(self.folders[-1]), self.ends[-2]
        manifest = si.make_batch_manifest(
            SCHEMA, [ChunkFile("v/0", 0, rows, 1, "none")], "v", batch_id=self.next_id - 1, first_row=first, query_id="q"
        )
        sealed = run_flow(stream_seal(paths.manifest(self.next_id - 1), manifest), self.storage)
        assert sealed.end_row == self.ends[-1]

    @rule(rows_max=st.sampled_from([1, 2, 30]), times=st.integers(3, 7))
    def read(self, rows_max: int, times: int) -> None:
        for _ in range(times):
            self.reading.step(rows_max)

    @rule()
    def checkpoint(self) -> None:
        if self.reading.reader.may_cut:
            for path in self.reading.reader.external_files():
                assert path in self.storage.files
            self.entries = self.reading.reader.snapshot()
            self.committed += self.reading.found
            self.reading.found.clear()

    @rule()
    def crash(self) -> None:
        self.attempt()

    @precondition(lambda self: len(self.folders) < 4)
    @rule(failed_over=st.booleans())
    def go_on_elsewhere(self, failed_over: bool) -> None:
        """With the query held, all was read: the copy of its checkpoint is of the same row as the savepoint; or of a later one,
        where the job had failed over in between."""
        if not (failed_over and self.entries is not None):
            for _ in range(60):
                self.reading.step(100)
            for _ in range(2):  # the second time it is idle: it holds up no barrier, and is in the checkpoint
                assert self.reading.reader.may_cut
                self.checkpoint()
            self.attempt()
            assert self.committed == list(range(self.ends[-1]))
        self.base = si.StreamBase(self.folders[-1], self.next_id - 1, self.ends[-1], "q")
        self.folders.append(f"{COPY}{len(self.folders)}")
        run_flow(si.make_stream_flow(self.folders[-1], SCHEMA, "src", self.base), self.storage)
        self.attempt()

    @invariant()
    def committed_rows_are_whole_batches(self) -> None:
        assert self.committed == list(range(len(self.committed)))
        assert len(self.committed) in self.ends


TestFork = Fork.TestCase
TestFork.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def overwriting_flow(path: str, manifest: Any) -> Any:
    yield WriteFile(path, [msgspec.json.encode(manifest)])
    return manifest


def cuts_behind_new_rows(self: StreamReader) -> bool:
    return bool(self._batches) and self._next_row() == self._batches[0].end_row > self._batches[0].first_row


def left_out_when_idle(self: StreamReader) -> list[bytes]:
    return [] if self._batches and self._next_row() == self._batches[-1].end_row else taken(self)


taken = StreamReader.snapshot


@pytest.mark.parametrize(
    ("owner", "name", "sabotage"),
    [
        (StreamReader, "may_cut", property(lambda self: True)),
        (StreamReader, "may_cut", property(cuts_behind_new_rows)),
        (StreamReader, "snapshot", left_out_when_idle),
        (sys.modules[__name__], "stream_seal", overwriting_flow),
        (StreamReader, "_follow_base", lambda self, starts, operator: None),
        (StreamReader, "_folder", lambda self, batch_id: self._source.folder),
        (StreamReader, "external_files", lambda self: (StreamPaths(self._input).manifest(self._batch_id() + 1),)),
    ],
    ids=[
        "a batch is cut",
        "an idle query waits",
        "an idle query is skipped",
        "a seal is overwritten",
        "a copy is not gone on with",
        "rows before the copy are left out",
        "another batch is named",
    ],
)
def test_broken_rules_are_seen(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, sabotage: Any) -> None:
    monkeypatch.setattr(owner, name, sabotage)
    unshrunk = settings(TestFork.settings, max_examples=500, phases=[Phase.generate], database=None, report_multiple_bugs=False)
    with pytest.raises((AssertionError, CorruptStateError)):
        run_state_machine_as_test(Fork, settings=unshrunk)


def test_a_copy_that_is_behind_the_savepoints_row_is_refused() -> None:
    given = Input()
    given.seal(4)
    reading = given.reader()
    reading.read(4)
    of = source()
    of.__dict__ |= {"folder": COPY, "base": si.StreamBase(FOLDER, 0, 2, "q")}
    with pytest.raises(CorruptStateError, match="row 4"):
        Reading(given.storage, of, 0, 1, reading.reader.snapshot())


def test_settings_that_a_query_has_kept_are_read_from_its_offsets() -> None:
    entry = b'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{"spark.sql.shuffle.partitions":"2"}}\n{"logOffset":3}'
    assert frozen_settings(entry, "p", "src") == {"spark.sql.shuffle.partitions": "2"}
    for bad in (b"", b"v1", b"v1\n{", b'v1\n{"conf":3}'):
        with pytest.raises(CorruptStateError):
            frozen_settings(bad, "p", "src")


# -------------------------------------------------------------------------------------------------------------- dropping


def metadata(checkpoint_id: int, external: tuple[str, ...], kind: Any = "checkpoint") -> bytes:
    return encode_metadata(
        SnapshotMetadata(
            job_id="job-a",
            job_name="a",
            checkpoint_id=checkpoint_id,
            kind=kind,
            attempt=1,
            epoch=1,
            trigger_timestamp_ms=0,
            completion_timestamp_ms=1,
            external=external,
            operators=(OperatorState("src", "0" * 32, "src", 0, 1, ()),),
        )
    )


def drop(given: Input) -> list[int]:
    run_flow(si.drop_batches_flow(FOLDER), given.storage)
    return run_flow(si.batch_ids_flow(FOLDER), given.storage)


@pytest.fixture
def full() -> Input:
    given = Input()
    for _ in range(6):
        given.seal(4)
    return given


def test_nothing_is_dropped_before_a_checkpoint_says_what_is_needed(full: Input) -> None:
    assert drop(full) == list(range(6))
    full.storage.files["job-a/chk-1/_claim"] = b"{}"
    assert drop(full) == list(range(6))
    full.storage.files["job-a/chk-1/_metadata"] = metadata(1, (PATHS.record,))
    assert drop(full) == list(range(6)), "it has read nothing"
    full.storage.files["job-a/chk-1/_metadata"] = metadata(1, ())
    assert drop(full) == list(range(6)), "it does not know the input: a restore begins with batch 0"


def test_batches_go_that_no_checkpoint_needs(full: Input) -> None:
    full.storage.files["job-a/chk-7/_metadata"] = metadata(
        7, (PATHS.manifest(3), PATHS.manifest(2), "job-a/sources/other/manifest.json")
    )
    full.storage.files["job-a/chk-8/_metadata"] = metadata(8, (PATHS.manifest(4),))
    full.storage.files["job-a/chk-9/_metadata"] = b'{"decision":"aborted","checkpoint_id":9}'
    assert drop(full) == [2, 3, 4, 5]
    del full.storage.files["job-a/chk-7/_metadata"]
    assert drop(full) == [4, 5]
    assert not any(path.startswith(PATHS.batch(3)) for path in full.storage.files)


def test_a_savepoint_keeps_batches_as_long_as_it_is_there(full: Input) -> None:
    full.storage.files["job-a/chk-7/_metadata"] = b'{"decision":"savepoint","checkpoint_id":7,"folder":"sp/savepoint-x"}'
    full.storage.files["sp/savepoint-x/_metadata"] = metadata(7, (PATHS.manifest(1),), "savepoint")
    full.storage.files["job-a/chk-8/_metadata"] = metadata(8, (PATHS.manifest(4),))
    assert drop(full) == [1, 2, 3, 4, 5]
    del full.storage.files["sp/savepoint-x/_metadata"]
    assert drop(full) == [4, 5]


def test_snapshots_of_every_owner_count(full: Input) -> None:
    run_flow(si.claim_input_flow(FOLDER, "job-b", 1, "m"), full.storage)
    full.storage.files["job-a/chk-7/_metadata"] = metadata(7, (PATHS.manifest(2),))
    assert drop(full) == list(range(6)), "the newest owner began with a snapshot that may be gone by now"
    full.storage.files["job-b/chk-8/_metadata"] = metadata(8, (PATHS.manifest(4),))
    assert drop(full) == [2, 3, 4, 5]


@pytest.mark.parametrize("content", [b"", b"{", b'{"decision":"savepoint"}', metadata(7, (PATHS.manifest(3),))[:-20]])
def test_a_snapshot_that_cant_be_read_may_need_anything(full: Input, content: bytes) -> None:
    full.storage.files["job-a/chk-7/_metadata"] = content
    full.storage.files["job-a/chk-8/_metadata"] = metadata(8, (PATHS.manifest(4),))
    with pytest.raises(CorruptStateError):
        drop(full)
    assert run_flow(si.batch_ids_flow(FOLDER), full.storage) == list(range(6))


def test_a_drop_that_was_cut_off_is_done_again(full: Input) -> None:
    full.storage.files["job-a/chk-8/_metadata"] = metadata(8, (PATHS.manifest(3),))
    flow: Any = si.drop_batches_flow(FOLDER)
    answer: Any = None
    operation: Any
    while not isinstance(operation := flow.send(answer), DeleteFolder):
        answer = full.storage.execute(operation)
    assert PATHS.manifest(0) not in full.storage.files
    assert drop(full) == [3, 4, 5]


def test_a_manifest_that_comes_late_does_not_bring_a_dropped_batch_back(full: Input) -> None:
    late = full.write(4, batch_id=0, first_row=0, writer="late")
    full.storage.files["job-a/chk-8/_metadata"] = metadata(8, (PATHS.manifest(3),))
    assert drop(full) == [3, 4, 5]
    assert [path for path in full.storage.files if "/dropped/" in path] == [PATHS.dropped_before(3)]
    full.storage.files[f"{PATHS.batch(0)}/late/0.arrow"] = b""
    run_flow(seal_flow(PATHS.manifest(0), late), full.storage)
    assert error_of(full.reader()).path == PATHS.manifest(0)
    full.storage.files["job-a/chk-8/_metadata"] = metadata(8, (PATHS.manifest(4),))
    assert drop(full) == [4, 5]
    assert [path for path in full.storage.files if "/dropped/" in path] == [PATHS.dropped_before(4)]


# ------------------------------------------------------------------------------------------------------------ bad input


def error_of(reading: Reading) -> Any:
    with pytest.raises((CorruptStateError, InputChangedError, UnsupportedVersionError)) as caught:
        reading.read()
    return caught.value


def test_rows_that_were_dropped_are_named(full: Input) -> None:
    behind, fresh = full.reader(), full.reader()
    behind.read(4)
    entries = behind.reader.snapshot()
    full.storage.files["job-a/chk-8/_metadata"] = metadata(8, (PATHS.manifest(3),))
    drop(full)
    for reading in (full.reader(entries=entries), full.reader(), fresh):
        assert isinstance(error := error_of(reading), CorruptStateError)
        assert (error.operator, error.path) == ("src", PATHS.manifest(0))


def test_a_first_batch_that_is_being_written_is_waited_for() -> None:
    given = Input()
    reading = given.reader()
    manifest = given.write(3, batch_id=0, first_row=0)
    assert reading.read(steps=6) == []
    run_flow(seal_flow(PATHS.manifest(0), manifest), given.storage)
    assert reading.read(3) == [0, 1, 2]


def test_batches_with_other_columns_are_refused(full: Input) -> None:
    other = pa.schema([("n", pa.int32()), ("text", pa.string())])
    error = error_of(full.reader(schema=other))
    assert isinstance(error, InputChangedError)
    assert "batch 0" in error.message
    with pytest.raises(InputChangedError):
        run_flow(si.make_stream_flow(FOLDER, other, "src"), full.storage)


def test_a_manifest_of_a_later_version_and_a_gap_of_rows_are_refused(full: Input) -> None:
    first = msgspec.json.decode(full.storage.files[PATHS.manifest(1)])
    full.storage.files[PATHS.manifest(1)] = msgspec.json.encode(first | {"version": 2})
    assert isinstance(error_of(full.reader()), UnsupportedVersionError)
    full.storage.files[PATHS.manifest(1)] = msgspec.json.encode(first | {"first_row": 5})
    assert "begins with row 5" in error_of(full.reader()).message


def test_a_damaged_chunk_is_named(full: Input) -> None:
    path = f"{PATHS.batch(0)}/w/0.arrow"
    full.storage.files[path] = full.storage.files[path][:-1]
    assert error_of(full.reader()).path == path


def test_positions_of_another_source_are_refused() -> None:
    with pytest.raises(CorruptStateError):
        decode_stream_positions([msgspec.msgpack.encode([1, 8, 0, 0, "in"])], "src")


# -------------------------------------------------------------------------------------------------------- starts, owners


def test_a_submission_knows_where_its_readers_began() -> None:
    given = Input()
    given.seal(20)
    readings = [given.reader(subtask, 2) for subtask in range(2)]
    readings[0].context.run_pool()
    assert run_flow(si.read_starts_flow(FOLDER, 1), given.storage) is None
    readings[1].context.run_pool()
    for reading, rows in zip(readings, (3, 8), strict=True):
        reading.read(rows)
    entries = [entry for reading in readings for entry in reading.reader.snapshot()]
    for subtask, parallelism in ((0, 3), (1, 3), (2, 3)):
        given.reader(subtask, parallelism, entries[subtask::3], submission=2).context.run_pool()
    given.reader(0, 3, [], submission=2).context.run_pool()
    starts = run_flow(si.read_starts_flow(FOLDER, 2), given.storage)
    assert starts is not None
    assert sum(start.rows_read for start in starts) == 11, "the second start of reader 0 changes nothing"
    assert {start.input for start in starts} == {FOLDER}


def test_owners_are_numbered_and_a_claim_may_be_repeated() -> None:
    given = Input()
    assert run_flow(si.claim_input_flow(FOLDER, "job-b", 3, "m"), given.storage) == 2
    assert run_flow(si.claim_input_flow(FOLDER, "job-b", 3, "m"), given.storage) == 2
    number, owner = run_flow(si.newest_owner_flow(FOLDER), given.storage) or (0, None)
    assert (number, owner and owner.job_id) == (2, "job-b")


def test_unread_batches_are_found_behind_the_rows_that_were_read(full: Input) -> None:
    def unread(rows: int) -> Iterator[int]:
        return iter([each.batch_id for each in run_flow(si.unread_batches_flow(FOLDER, rows), full.storage)])

    assert list(unread(0)) == list(range(6))
    assert list(unread(7)) == [1, 2, 3, 4, 5]
    assert list(unread(8)) == [2, 3, 4, 5]
    assert list(unread(24)) == []


def test_the_newest_input_of_a_source_is_found() -> None:
    given = Input()
    assert run_flow(si.find_stream_flow("job-a", "src"), given.storage) == FOLDER
    given.storage.files["job-a/sources/src/000002/manifest.json"] = b""
    assert run_flow(si.find_stream_flow("job-a", "src"), given.storage) == FOLDER
    given.storage.files["job-a/sources/src/000003/stream.json"] = b""
    assert run_flow(si.find_stream_flow("job-a", "src"), given.storage) == "job-a/sources/src/000003"
    assert run_flow(si.find_stream_flow("job-b", "src"), given.storage) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id":3}', b'{"id":""}', b'{"id":"../x"}', b"\xff"])
def test_a_checkpoint_without_an_id_is_named(content: bytes) -> None:
    assert query_id_of(b'{"id":"7a3c-1"}', "c/metadata") == "7a3c-1"
    with pytest.raises(CorruptStateError, match="c/metadata") as caught:
        query_id_of(content, "c/metadata")
    assert caught.value.path == "c/metadata"

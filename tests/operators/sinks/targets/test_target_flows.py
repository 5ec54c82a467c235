"""A target's committer, operation by operation: which rows go in which step, and what it does about answers that get lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from holdfast.barriers.sinks.log import StagedFile
from holdfast.barriers.sinks.staged import CommitMark, CommitPosition, StagedCheckpoint
from holdfast.operators.sinks.calls import TRIES, Pause
from holdfast.operators.sinks.targets import port as target_port
from holdfast.operators.sinks.targets.committer import TargetFlows, forget_flow
from holdfast.operators.sinks.targets.port import TargetPort
from holdfast.operators.sinks.targets.positions import CommitOwner
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.operators.sinks.targets.staging import StagingPaths, line_flow, next_step
from holdfast.operators.sinks.targets.target import ApplyRows, CommitTarget, FileSlice, FindMissing, OpenTarget
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    CommittableLostError,
    CorruptStateError,
    FencedError,
    HoldfastError,
    InvalidConfigError,
    InvariantError,
    StorageUnavailableError,
)
from holdfast.statebackends.storage.port import PutIfAbsent, ReadFile, drive, path_of
from tests.operators.ports import DictStorage

SCHEMA = pa.schema([("i", pa.int64())])


def checkpoint(number: int, *rows: int) -> StagedCheckpoint:
    files = tuple(StagedFile(f"{number}-{index}", count) for index, count in enumerate(rows))
    return StagedCheckpoint(number, "/state/job/sinks/out/staged", files)


def mark(staged: StagedCheckpoint) -> CommitMark:
    return CommitMark(staged.checkpoint_id, tag=staged.tag)


def at(number: int, row: int = -1) -> CommitPosition:
    return CommitPosition(1, "out", 1, "n", "job", 1, number, row)


# ------------------------------------------------------------------------------------------------------------------ steps

STEPS: dict[str, tuple[tuple[int, int], int | None, list[tuple[list[str], int, int]]]] = {
    # position, rows_per_commit -> (slices, checkpoint, row) of each step; staged: 1 of 3+2 rows, 2 of 4, 4 of 1
    "all at once": ((0, -1), None, [(["1-0[0:3]", "1-1[0:2]", "2-0[0:4]", "4-0[0:1]"], 4, -1)]),
    "behind the first": ((1, -1), None, [(["2-0[0:4]", "4-0[0:1]"], 4, -1)]),
    "behind an id without rows": ((3, -1), None, [(["4-0[0:1]"], 4, -1)]),
    "within the first": ((1, 4), None, [(["1-1[1:2]", "2-0[0:4]", "4-0[0:1]"], 4, -1)]),
    "all done": ((4, -1), None, []),
    "beyond": ((9, -1), 2, []),
    "whole checkpoints as far as they go": ((0, -1), 9, [(["1-0[0:3]", "1-1[0:2]", "2-0[0:4]"], 2, -1), (["4-0[0:1]"], 4, -1)]),
    "one by one where two are too many": (
        (0, -1),
        5,
        [(["1-0[0:3]", "1-1[0:2]"], 1, -1), (["2-0[0:4]", "4-0[0:1]"], 4, -1)],
    ),
    "in steps": (
        (0, -1),
        4,
        [(["1-0[0:3]", "1-1[0:1]"], 1, 4), (["1-1[1:2]"], 1, -1), (["2-0[0:4]"], 2, -1), (["4-0[0:1]"], 4, -1)],
    ),
    "row by row": ((2, 2), 1, [(["2-0[2:3]"], 2, 3), (["2-0[3:4]"], 2, -1), (["4-0[0:1]"], 4, -1)]),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_rows_of_each_step(case: str) -> None:
    (number, row), rows_max, expected = STEPS[case]
    position, due, found = at(number, row), (checkpoint(1, 3, 2), checkpoint(2, 4), checkpoint(4, 1)), []
    while (step := next_step(position, due, rows_max)) is not None:
        found.append(([f"{piece.name}[{piece.start}:{piece.stop}]" for piece in step.slices], step.checkpoint_id, step.row))
        position = position.moved(step.checkpoint_id, step.row)
    assert found == expected


# ------------------------------------------------------------------------------------------------------------------ flows


class Fake:
    """A target that answers as the script says: an error before or behind the effect of call k, whatever call it is."""

    def __init__(self, script: dict[int, tuple[str, Exception]] | None = None) -> None:
        self.script = script or {}
        self.stored: CommitPosition | None = None
        self.rows: list[str] = []
        self.calls: list[str] = []
        self.gone: set[str] = set()

    def fulfil(self, operation: Any) -> Any:
        match operation:
            case OpenTarget():
                return self.call("open", lambda: self.open(operation.owner))
            case ApplyRows():
                return self.call("apply", lambda: self.apply(operation))
            case FindMissing():
                return bool(self.gone & set(operation.names))
            case Pause():
                self.calls.append(f"{operation.delay_ms} ms")
                return None
            case _:
                raise AssertionError(operation)

    def call(self, name: str, act: Callable[[], Any]) -> Any:
        when, error = self.script.pop(sum(not call.endswith("ms") for call in self.calls), ("", None))
        self.calls.append(name)
        if error is not None and when == "before":
            raise error
        result = act()
        if error is not None:
            raise error
        return result

    def open(self, owner: CommitOwner) -> CommitPosition:
        self.stored = owner.take(self.stored)
        return self.stored

    def apply(self, operation: ApplyRows) -> None:
        if self.stored != operation.expected:
            raise FencedError("another owner")
        self.rows += [f"{piece.name}[{piece.start}:{piece.stop}]" for piece in operation.slices]
        self.stored = operation.position


DUE = (checkpoint(1, 3), checkpoint(2, 2))


def flows(attempt: int = 1, restored: int = 9) -> TargetFlows:
    pending = tuple(mark(each) for each in DUE)
    return TargetFlows("target", CommitOwner("out", "job", attempt, f"n{attempt}", None, pending, restored))


ROWS = ["1-0[0:3]", "2-0[0:2]"]
LOST = ConnectionError("the connection broke")


def run(fake: Fake, rows_max: int | None = None) -> CommitPosition:
    opened = drive(flows().open(None), fake.fulfil)
    return drive(flows().commit(opened, DUE, rows_max), fake.fulfil)


CALLS: dict[str, tuple[dict[int, tuple[str, Exception]], list[str]]] = {
    # the k-th call fails before or behind its effect -> all calls
    "all answered": ({}, ["open", "apply"]),
    "open not done": ({0: ("before", LOST)}, ["open", "100 ms", "open", "apply"]),
    "open done, answer lost": ({0: ("behind", LOST)}, ["open", "100 ms", "open", "apply"]),
    "apply not done": ({1: ("before", LOST)}, ["open", "apply", "open", "apply"]),
    "apply done, answer lost": ({1: ("behind", LOST)}, ["open", "apply", "open"]),
    "apply done, a conflict with itself is told": ({1: ("behind", FencedError("again"))}, ["open", "apply", "open"]),
    "apply and open lost": (
        {1: ("behind", LOST), 2: ("before", LOST)},
        ["open", "apply", "open", "100 ms", "open"],
    ),
    "apply not done, twice": (
        {1: ("before", LOST), 3: ("before", StorageUnavailableError("busy"))},
        ["open", "apply", "open", "apply", "100 ms", "open", "apply"],
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_rows_are_there_once_whatever_answer_is_lost(case: str) -> None:
    script, expected = CALLS[case]
    fake = Fake(dict(script))
    position = run(fake)
    assert fake.rows == ROWS
    assert fake.calls == expected
    assert fake.stored == position
    assert (position.checkpoint_id, position.row) == (2, -1)


@pytest.mark.parametrize("call", range(1, 8))
@pytest.mark.parametrize("when", ["before", "behind"])
def test_steps_are_there_once_whatever_answer_is_lost(call: int, when: str) -> None:
    fake = Fake({call: (when, LOST)})
    run(fake, rows_max=1)
    assert fake.rows == ["1-0[0:1]", "1-0[1:2]", "1-0[2:3]", "2-0[0:1]", "2-0[1:2]"]


def test_a_secret_that_a_client_quotes_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_DSN", "postgresql://me:hunter2@db/shop")
    hf.Secret("HOLDFAST_TEST_DSN").resolve()
    for quoted in ("postgresql://me:hunter2@db/shop", "hunter2"):
        fake = Fake(dict.fromkeys(range(1, 100), ("before", ConnectionError(f"no answer from {quoted}"))))
        with pytest.raises(StorageUnavailableError, match=r"no answer from \*\*\*") as raised:
            run(fake)
        assert quoted not in str(raised.value)


def test_a_target_that_never_answers_is_given_up_and_called_by_name() -> None:
    fake = Fake(dict.fromkeys(range(1, 100, 2), ("before", LOST)))
    with pytest.raises(AmbiguousWriteError, match=r"does not take the rows up to checkpoint 2, 6 times: ConnectionError: the conn"):
        run(fake)
    assert fake.calls.count("apply") == TRIES.attempts_max
    with pytest.raises(StorageUnavailableError, match="can't be opened, 6 times"):
        run(Fake(dict.fromkeys(range(100), ("before", LOST))))


def test_an_error_that_says_that_nothing_changed_is_not_tried_again() -> None:
    for error in (InvalidConfigError("no such table"), CommittableLostError("gone", sink="out", path="x", checkpoint=1)):
        fake = Fake({1: ("before", error)})
        with pytest.raises(type(error)):
            run(fake)
        assert fake.calls.count("apply") == 1


def test_whoever_was_replaced_ends_with_its_first_commit() -> None:
    fake = Fake()
    opened = drive(flows(1).open(None), fake.fulfil)
    drive(flows(2).open(opened), fake.fulfil)
    with pytest.raises(FencedError, match=r"taken over meanwhile.* attempt 2"):
        drive(flows(1).commit(opened, DUE, None), fake.fulfil)
    assert fake.rows == []


@pytest.mark.parametrize("mishap", [None, LOST])
def test_rows_of_another_state_directory_never_pass_for_one_s_own(mishap: Exception | None) -> None:
    """Two clusters run a job of one name on one sink, both at attempt 1, with other rows under the same ids: even where the second
    one took the target from the first, that one does not take the second's commit for its own."""
    fake = Fake({} if mishap is None else {2: ("before", mishap)})

    def in_store(line: str) -> TargetFlows:
        owner = flows().owner
        return TargetFlows("target", replace(owner, nonce=line, line=line, allow_output_repeat=line == "y"))

    first = drive(in_store("x").open(None), fake.fulfil)
    second = drive(in_store("y").open(None), fake.fulfil)
    others = tuple(msgspec.structs.replace(each, files=tuple(StagedFile(f"y{f.name}", f.rows) for f in each.files)) for each in DUE)
    drive(in_store("y").commit(second, others, None), fake.fulfil)
    with pytest.raises(FencedError, match="taken over meanwhile"):
        drive(in_store("x").commit(first, DUE, None), fake.fulfil)
    with pytest.raises(FencedError, match="another state directory"):
        drive(in_store("x").open(None), fake.fulfil)
    assert fake.rows == ["y1-0[0:3]", "y2-0[0:2]"]


def test_a_position_between_two_steps_is_a_target_that_is_not_atomic() -> None:
    fake = Fake({1: ("before", LOST)})
    opened = drive(flows().open(None), fake.fulfil)
    broken = flows().commit(opened, DUE, None)

    def fulfil(operation: Any) -> Any:
        if isinstance(operation, OpenTarget) and fake.stored is not None:
            fake.stored = fake.stored.moved(1, 2)
        return fake.fulfil(operation)

    with pytest.raises(InvariantError, match="does not store the position with the rows"):
        drive(broken, fulfil)


def test_a_first_opening_that_takes_effect_between_two_steps_repeats_no_row() -> None:
    """A user went back behind all rows; the request that says so was taken for lost, and arrives behind the first step."""
    fake = Fake()
    fake.stored = at(6)
    first = replace(flows(2, 0).owner, pending=(), allow_output_repeat=True)
    opened = drive(TargetFlows("target", first).open(None), fake.fulfil)
    late = [first]

    def fulfil(operation: Any) -> Any:
        if isinstance(operation, ApplyRows) and fake.rows and late:
            fake.open(late.pop())
        return fake.fulfil(operation)

    drive(flows(2).commit(opened, DUE, 3), fulfil)
    assert not late
    assert fake.rows == ROWS


def test_open_has_to_return_what_was_taken() -> None:
    class Wrong(Fake):
        def open(self, owner: CommitOwner) -> CommitPosition:
            return at(3)

    with pytest.raises(InvalidConfigError, match=r"owner\.take\(\)"):
        run(Wrong())


def test_what_a_user_went_back_to_is_committed_unless_its_files_are_gone(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake()
    fake.stored = msgspec.structs.replace(at(6), attempt=1)
    known = at(0)
    pending = tuple(mark(each) for each in DUE)
    back = TargetFlows("target", CommitOwner("out", "job", 2, "n2", known, pending, 2, allow_output_repeat=True))
    opened = drive(back.open(known), fake.fulfil)
    fake.gone = {"1-0"}
    drive(back.commit(opened, DUE, None), fake.fulfil)
    assert fake.rows == ["2-0[0:2]"]
    assert "the 3 rows of checkpoint 1 are taken for committed" in caplog.text


# ------------------------------------------------------------------------------------------------------------------- port


class Lists(CommitTarget):
    """Keeps the batches that it gets, up to a number of them."""

    def __init__(self, batches_max: int = 100) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.batches_max = batches_max
        self.closed = 0

    def open(self, owner: CommitOwner) -> CommitPosition:
        return owner.take(None)

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        for batch in batches:
            self.batches.append(batch)
            if len(self.batches) == self.batches_max:
                return

    def close(self) -> None:
        self.closed += 1


def staged(rows: int) -> bytes:
    target = pa.BufferOutputStream()
    pq.write_table(pa.table({"i": range(rows)}, SCHEMA), target, write_page_checksum=True)
    return target.getvalue().to_pybytes()


class Folders(DictStorage):
    def at(self, location: str) -> DictStorage:
        return self


def folders() -> Folders:
    return Folders({"a": staged(5), "b": staged(3)})


def port(target: CommitTarget, storage: Folders | None = None) -> TargetPort:
    return TargetPort(target, folders() if storage is None else storage)


def apply(*slices: FileSlice) -> ApplyRows:
    return ApplyRows("target", slices, at(0), at(1))


def test_a_target_gets_the_rows_of_each_slice() -> None:
    target = Lists()
    port(target).execute(apply(FileSlice("/f", "a", 2, 5), FileSlice("/f", "b", 0, 1)))
    assert [batch.column(0).to_pylist() for batch in target.batches] == [[2, 3, 4], [0]]


def test_a_file_that_is_gone_is_told_before_anything_is_applied() -> None:
    target = Lists()
    with pytest.raises(CommittableLostError, match="/f/c of checkpoint 1"):
        port(target).execute(apply(FileSlice("/f", "a", 0, 5), FileSlice("/f", "c", 0, 1)))
    assert target.batches == []


def test_a_target_that_leaves_rows_is_told() -> None:
    with pytest.raises(InvalidConfigError, match="3 rows are left"):
        port(Lists(1)).execute(apply(FileSlice("/f", "a", 0, 5), FileSlice("/f", "b", 0, 3)))


def asked(storage: Folders) -> list[str]:
    return [f"{type(operation).__name__} {path_of(operation)}" for operation in storage.log]


def test_each_file_is_found_and_read_once_in_a_commit_whatever_its_steps() -> None:
    target, storage = Lists(), folders()
    ports = port(target, storage)
    steps = [("a", 0, 2), ("a", 2, 4), ("a", 4, 5), ("b", 0, 2), ("b", 2, 3)]
    for number, (name, start, stop) in enumerate(steps, 1):
        position = at(1, number) if number < len(steps) else at(1)
        ports.execute(ApplyRows("target", (FileSlice("/f", name, start, stop),), at(0), position))
    assert [batch.column(0).to_pylist() for batch in target.batches] == [[0, 1], [2, 3], [4], [0, 1], [2]]
    assert asked(storage) == ["StatFile a", "ReadFile a", "StatFile b", "ReadFile b"]


def test_no_row_behind_the_end_of_a_slice_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.operators.sinks.targets.port.BATCH_ROWS", 10)
    decoded: list[int] = []
    decode = target_port._OpenFile._decode_next

    def counted(file: Any) -> pa.RecordBatch:
        batch = decode(file)
        decoded.append(batch.num_rows)
        return batch

    monkeypatch.setattr(target_port._OpenFile, "_decode_next", counted)
    target = Lists()
    ports = port(target, Folders({"a": staged(1_000)}))
    for number in range(4):
        ports.execute(ApplyRows("target", (FileSlice("/f", "a", 5 * number, 5 * number + 5),), at(0), at(1, 5 * number + 5)))
    assert sum(decoded) == 20, "a step goes on where the one before ended"
    ports.execute(ApplyRows("target", (FileSlice("/f", "a", 15, 20),), at(0), at(1, 20)))  # again, behind a lost answer
    assert [row for batch in target.batches for row in batch.column(0).to_pylist()] == [*range(20), *range(15, 20)]


def test_a_call_without_an_answer_reads_its_files_again() -> None:
    class Breaks(Lists):
        breaks = True

        def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
            if self.breaks:
                self.breaks = False
                for _ in range(2):
                    next(batches)
                raise ConnectionError
            super().apply(batches, expected, position)

    target = Breaks()
    ports = port(target)
    wanted = apply(FileSlice("/f", "a", 1, 5), FileSlice("/f", "b", 0, 2))
    with pytest.raises(ConnectionError):
        ports.execute(wanted)
    ports.execute(wanted)
    assert [batch.column(0).to_pylist() for batch in target.batches] == [[1, 2, 3, 4], [0, 1]]


class Wraps(Lists):
    """Puts what it meets into an error of its own, as clients do."""

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        try:
            super().apply(batches, expected, position)
        except Exception as error:
            raise ConnectionError("copy failed") from error


@pytest.mark.parametrize("damage", ["short", "page", "footer"])
@pytest.mark.parametrize("target", [Lists, Wraps])
def test_a_damaged_file_is_named_before_its_position_is_stored(damage: str, target: type[Lists]) -> None:
    data = staged(5)
    changed = bytearray(data)
    changed[len(data) // 4 if damage == "page" else -6] ^= 255
    content = staged(4) if damage == "short" else bytes(changed)
    ports = TargetPort(target(), Folders({"a": content}))
    with pytest.raises(CorruptStateError, match="/f/a is damaged"):
        ports.execute(apply(FileSlice("/f", "a", 0, 5)))


@pytest.mark.parametrize("target", [Lists, Wraps])
def test_a_file_that_goes_between_two_steps_is_told(target: type[Lists]) -> None:
    storage = folders()
    ports = TargetPort(target(), storage)
    ports._rows.find_missing([("/f", "a"), ("/f", "b")])
    del storage.files["b"]
    with pytest.raises(CommittableLostError, match="b of checkpoint 1"):
        ports.execute(apply(FileSlice("/f", "a", 0, 5), FileSlice("/f", "b", 0, 1)))


# ------------------------------------------------------------------------------------------------------------------ state


def test_a_staged_file_stands_in_a_snapshot_beside_the_marker_of_its_folder() -> None:
    assert list(checkpoint(7, 2).external) == ["/state/job/sinks/out/staged/7-0|/state/job/sinks/out/staging.json"]
    paths = StagingPaths("job", "a sink/of mine")
    assert paths.staged("x") == "job/sinks/a%20sink%2Fof%20mine/staged/x"
    assert paths.marker == "job/sinks/a%20sink%2Fof%20mine/staging.json"


def test_the_line_of_a_state_directory_is_the_first_one_for_ever() -> None:
    files: dict[str, bytes] = {}
    ambiguous = [AmbiguousWriteError("no answer", path="x")]

    def fulfil(operation: Any) -> Any:
        if isinstance(operation, PutIfAbsent):
            is_new = operation.path not in files
            files.setdefault(operation.path, bytes(operation.data))
            if ambiguous:
                raise ambiguous.pop()
            return is_new
        assert isinstance(operation, ReadFile)
        return files[operation.path]

    paths = StagingPaths("job", "out")
    assert [drive(line_flow(paths, nonce), fulfil) for nonce in ("first", "second")] == ["first", "first"]
    assert drive(line_flow(StagingPaths("job", "other"), "third"), fulfil) == "third"


def test_a_staged_file_that_can_not_be_deleted_does_not_end_the_job(caplog: pytest.LogCaptureFixture) -> None:
    def fulfil(operation: Any) -> Any:
        raise StorageUnavailableError("read-only")

    drive(forget_flow(StagingPaths("job", "out"), DUE, "/state/job/sinks/out/staged"), fulfil)
    assert "left for now" in caplog.text


def test_a_message_about_a_wrong_target_does_not_show_what_it_may_hold() -> None:
    with pytest.raises(HoldfastError) as raised:
        StagedSink("postgresql://user:password@host/db")  # type: ignore[arg-type]
    assert "password" not in str(raised.value)


@pytest.mark.parametrize(
    "setting", [{"rows_per_commit": 0}, {"rows_per_commit": True}, {"commit_interval_ms": -1}, {"file_size_max": None}]
)
def test_settings_out_of_bounds_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError, match=next(iter(setting))):
        StagedSink(Lists(), **setting)
    with pytest.raises(HoldfastError, match="CommitTarget"):
        StagedSink(Path())  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [None, 10])
def test_explain_says_that_a_checkpoint_is_shown_in_steps(rows: int | None) -> None:
    words = "readers see a checkpoint of more than 10 rows in steps, at most 10 rows each"
    job = hf.testing.Job()
    job.input("rows", {"i": int}).stream.sink_to(StagedSink(Lists(), "orders", rows_per_commit=rows), uid="orders")
    text, graph = job.environment.explain(), json.loads(job.environment.explain(format="json"))
    assert (words in text) == (rows is not None)
    assert [node["note"] for node in graph["stream_graph"] if node["uid"] == "orders"] == [words if rows else None]
    job.close()

"""The oracle on hand-made outputs: what it reads, and that it finds what is missing, extra, out of order, changed or gone."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.chaos.checkers.oracle import (
    CommittedOutput,
    OutputDamagedError,
    Sequences,
    committed,
    compare,
    compare_states,
    counted,
)
from holdfast.chaos.checkers.state_reading import SnapshotView, StateDoubledError
from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.scenario import Possibly, SinkExpectation
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorState,
    OperatorSubtaskState,
    StateMeta,
)
from holdfast.statebackends.handles import OperatorListHandle as ListHandle
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.checksums import checksum_of

LEDGER = SinkExpectation("/out", "led/ger", None, ordered_by=(0, 1), steps_by_one=True)
FOLDER = "_holdfast/led%2Fger"


class View:
    """A store in a dict: implements `StoreView`."""

    def __init__(self) -> None:
        self.root = "/out"
        self.files: dict[str, bytes] = {}

    def peek(self, path: str) -> bytes | None:
        return self.files.get(path)

    def size(self, path: str) -> int | None:
        return len(self.files[path]) if path in self.files else None

    def paths(self, prefix: str = "") -> list[str]:
        return sorted(path for path in self.files if path.startswith(prefix))

    # --------------------------------------------------------------------------------------------------------- writing

    def put(self, name: str, columns: dict[str, pa.Array]) -> None:
        target = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), target)
        self.files[f"{FOLDER}/data/{name}"] = target.getvalue().to_pybytes()

    def put_rows(self, name: str, *rows: tuple[int, int]) -> None:
        self.put(name, {"key": pa.array([key for key, _ in rows]), "seq": pa.array([seq for _, seq in rows])})

    def log(self, sequence: int, kind: str, **fields: object) -> None:
        self.files[f"{FOLDER}/log/{sequence:012d}.json"] = json.dumps({"type": kind, **fields}).encode()

    def commit(self, sequence: int, checkpoint_id: int, **files: int) -> None:
        self.log(
            sequence, "commit", checkpoint_id=checkpoint_id, files=[{"name": name, "rows": rows} for name, rows in files.items()]
        )


@pytest.fixture
def view() -> View:
    view = View()
    view.log(0, "owner")
    view.put_rows("a", (1, 1), (2, 1), (1, 2))
    view.put_rows("b", (2, 2))
    view.commit(1, 3, a=3)
    view.commit(2, 5, b=1)
    return view


def test_files_come_in_the_order_of_commits(view: View) -> None:
    files = committed(view, "led/ger")
    assert [(file.checkpoint_id, file.name, file.rows) for file in files] == [
        (3, "a", [(1, 1), (2, 1), (1, 2)]),
        (5, "b", [(2, 2)]),
    ]
    assert counted(files, LEDGER) == Counter([(1, 1), (1, 2), (2, 1), (2, 2)])


def test_a_sink_that_nobody_wrote_to_has_no_files() -> None:
    assert committed(View(), "led/ger") == []


def test_each_commit_is_read_once(view: View) -> None:
    output = CommittedOutput(view, "led/ger")
    assert [file.name for file in output.refresh()] == ["a", "b"]
    assert output.refresh() == []
    view.put_rows("c", (1, 3))
    view.commit(3, 6, c=1)
    assert [file.name for file in output.refresh()] == ["c"]
    assert len(output.files) == 3


def test_timestamps_are_microseconds(view: View) -> None:
    moment = datetime(2020, 1, 1, tzinfo=UTC)
    us = 1_577_836_800_000_000
    view.put("c", {"us": pa.array([moment], pa.timestamp("us", "UTC")), "ms": pa.array([moment], pa.timestamp("ms"))})
    view.commit(3, 6, c=1)
    assert committed(view, "led/ger")[-1].rows == [(us, us)]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda view: view.files.pop(f"{FOLDER}/data/b"), "b of checkpoint 5 is committed and does not exist"),
        (lambda view: view.files.update({f"{FOLDER}/data/b": b"PAR1"}), "b of checkpoint 5 is committed and can't be read"),
        (lambda view: view.commit(3, 6, b=1), "b of checkpoint 6 is committed twice"),
        (lambda view: view.commit(2, 5, b=2), "b of checkpoint 5 has 1 rows, 2 were committed"),
    ],
)
def test_damaged_output_is_refused(view: View, damage: object, reason: str) -> None:
    damage(view)  # type: ignore[operator]
    with pytest.raises(OutputDamagedError, match=reason):
        committed(view, "led/ger")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda view: view.files.pop(f"{FOLDER}/data/a"), "a was committed and has changed or is gone"),
        (lambda view: view.put_rows("a", (1, 1), (2, 1), (1, 3)), "a was committed and has changed or is gone"),
        (lambda view: view.commit(1, 4, a=3), "entry 1 of its log has changed or is gone"),
        (lambda view: view.files.pop(f"{FOLDER}/log/000000000000.json"), "entry 0 of its log has changed or is gone"),
    ],
)
def test_output_that_changes_later_is_noticed(view: View, damage: object, reason: str) -> None:
    output = CommittedOutput(view, "led/ger")
    output.refresh()
    output.recheck()
    damage(view)  # type: ignore[operator]
    with pytest.raises(OutputDamagedError, match=reason):
        output.recheck()


# ----------------------------------------------------------------------------------------------------------------- verdicts


def rows_of(*rows: Row) -> Counter[Row]:
    return Counter(rows)


def test_missing_and_extra_rows_are_named() -> None:
    assert compare(rows_of((1, 1), (1, 2)), rows_of((1, 2), (1, 1))) is None
    assert compare(rows_of((1, 1), (1, 2)), rows_of((1, 1))) == "1 of 2 rows; 1 missing: (1, 2)"
    assert compare(rows_of((1, 1)), rows_of((1, 1), (1, 1), (2, 1))) == "3 of 1 rows; 2 too many: (1, 1), (2, 1)"
    many = Counter({(key,): 1 for key in range(9)})
    assert compare(many, Counter()) == "0 of 9 rows; 9 missing: (0,), (1,), (2,), (3,), (4,) ..."


def test_rows_may_be_missing_while_more_can_come() -> None:
    assert compare(rows_of((1, 1), (1, 2)), rows_of((1, 1)), partly=True) is None
    assert compare(rows_of((1, 1)), rows_of((2, 2)), partly=True) == "1 of 1 rows; 1 too many: (2, 2)"


def test_only_compared_columns_count(view: View) -> None:
    sink = SinkExpectation("/out", "led/ger", None, compared=(1,))
    assert counted(committed(view, "led/ger"), sink) == rows_of((1,), (1,), (2,), (2,))


def test_only_the_last_row_of_a_key_counts(view: View) -> None:
    sink = SinkExpectation("/out", "led/ger", None, ordered_by=(0, 1), last_of_key=True)
    assert counted(committed(view, "led/ger"), sink) == rows_of((1, 2), (2, 2))


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (((1, 3), (2, 3)), None),
        (((1, 2),), ("I3", "key 1 has 2 after 2 in c of checkpoint 6")),
        (((2, 1),), ("I3", "key 2 has 1 after 2 in c of checkpoint 6")),
        (((1, 4),), ("I5", "key 1 has 4 after 2 in c of checkpoint 6")),
        (((3, 2),), ("I5", "key 3 has 2 after None in c of checkpoint 6")),
    ],
)
def test_sequences_rise_by_one(view: View, rows: tuple[tuple[int, int], ...], found: tuple[str, str] | None) -> None:
    view.put_rows("c", *rows)
    view.commit(3, 6, c=len(rows))
    sequences = Sequences(LEDGER)
    verdicts = [sequences.add(file) for file in committed(view, "led/ger")]
    assert verdicts == [None, None, found]


def test_states_are_compared_key_by_key() -> None:
    expected = {"count": {1: 5, 2: 7, 3: Possibly(9), 4: Possibly(None)}}
    assert compare_states(expected, {"count": {1: 5, 2: 7, 3: 9, 4: None}, "other": {1: 1}}) is None
    assert compare_states(expected, {"count": {1: 5, 2: 7}}) is None
    wrong = compare_states(expected, {"count": {1: 6, 3: 8, 5: 1}})
    assert wrong == "state 'count': 1 is 6, not 5; 2 is absent, not 7; 3 is 8, not 9; 5 is 1, not absent"
    assert compare_states({"count": {}}, {}) is None


# ---------------------------------------------------------------------------------------------------------------- snapshots

COUNT = StateMeta("count", "value", "int", "int64")
POSITIONS = ListHandle(StateMeta("positions", "operator_list", ""), InlineHandle(b"\x92\xc4\x01a\xc4\x01b"), 2)


def keyed(*rows: tuple[int, int]) -> OperatorSubtaskState:
    """Keyed state of one subtask, as a table."""
    table = pa.table(
        {
            "key_group": pa.array([0] * len(rows), pa.int32()),
            "key": pa.array([key for key, _ in rows], pa.int64()),
            "namespace": pa.array([b""] * len(rows), pa.binary()),
            "value": pa.array([value for _, value in rows], pa.int64()),
        }
    )
    target = pa.BufferOutputStream()
    with pa.ipc.new_file(target, table.schema) as writer:
        writer.write_table(table)
    part = InlineHandle(target.getvalue().to_pybytes())
    return OperatorSubtaskState(
        keyed=(KeyedStateHandle(KeyGroupRange(0, 1), "arrow", (COUNT,), (part,)),), operator=(POSITIONS,)
    )


def snapshot(*subtasks: OperatorSubtaskState) -> View:
    view = View()
    operator = OperatorState("op", "0" * 32, "op", len(subtasks), 8, subtasks)
    metadata = SnapshotMetadata(
        job_id="job",
        job_name="job",
        checkpoint_id=1,
        kind="checkpoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=0,
        completion_timestamp_ms=0,
        operators=(operator,),
    )
    view.files["job/chk-1/_metadata"] = encode_metadata(metadata)
    return view


def test_state_and_positions_are_those_of_all_subtasks() -> None:
    view = snapshot(keyed((1, 5), (2, 6)), keyed((3, 7)))
    assert SnapshotView(view, "job/chk-1").keyed_state("op") == {"count": {1: 5, 2: 6, 3: 7}}
    assert SnapshotView(view, "job/chk-1").positions(["op", "other"]) == {"op": [b"a", b"b", b"a", b"b"], "other": []}
    assert SnapshotView(view, "job/chk-1").keyed_state("other") == {}
    assert SnapshotView(view, "job/chk-1").keyed_state("op", ["count", "lost"]) == {"count": {1: 5, 2: 6, 3: 7}}


def test_a_key_on_two_subtasks_is_refused() -> None:
    with pytest.raises(StateDoubledError, match="operator op: state count has 1 twice"):
        SnapshotView(snapshot(keyed((1, 5)), keyed((1, 6))), "job/chk-1").keyed_state("op")


def stored(state: OperatorSubtaskState, name: str) -> tuple[OperatorSubtaskState, bytes]:
    """The same, with its table in a file of the snapshot."""
    (handle,) = state.keyed
    (inline,) = handle.parts
    assert isinstance(inline, InlineHandle)
    part = FileHandle(name, inline.length, checksum_of(inline.data))
    return OperatorSubtaskState(keyed=(msgspec.structs.replace(handle, parts=(part,)),), operator=state.operator), inline.data


def test_whole_tables_are_read_without_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("holdfast.chaos.checkers.state_reading.read_rows")
    in_file, data = stored(keyed((1, 5), (2, 6)), "op-0")
    view = snapshot(in_file, keyed((3, 7)))
    view.files["job/chk-1/op-0"] = data
    assert SnapshotView(view, "job/chk-1").keyed_state("op") == {"count": {1: 5, 2: 6, 3: 7}}


def test_a_table_that_is_not_what_was_stored_is_refused() -> None:
    in_file, data = stored(keyed((1, 5)), "op-0")
    view = snapshot(in_file)
    view.files["job/chk-1/op-0"] = data[:-20] + b"\xff" + data[-19:]
    with pytest.raises(CorruptStateError, match="op-0 is not what was stored"):
        SnapshotView(view, "job/chk-1").keyed_state("op")

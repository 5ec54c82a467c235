"""Operator state and timers, edited and made anew: whose each entry is, what is refused, what a job finds in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pandas
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.api.cli.main import app
from holdfast.api.snapshots.frames import change_of
from holdfast.operators.functions.process import ProcessFunction, ProcessOperator
from holdfast.operators.functions.schema import UNDECLARED, RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, InvalidKeyError, NotFoundError, StateValueError
from holdfast.statebackends.handles import FileHandle, InlineHandle, StateMeta
from holdfast.statebackends.state import OperatorListStateDescriptor, Redistribution
from holdfast.statebackends.state_processor.conform import EntryLists
from holdfast.statebackends.state_processor.edit import edit_snapshot
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import Operation
from tests.api.test_snapshots import fails, run, runner
from tests.examples import examples
from tests.operators.harness import HarnessSnapshot, OperatorHarness
from tests.operators.ports import DictStorage
from tests.statebackends.snapshot_harness import UID, Contents, files_below, write

MANY = Contents(count={"AA": 1}, positions=[[f"{number}.parquet", number] for number in range(7)], rules=["r1", "r2"])


def entries(snapshot: hf.Snapshot, state: str, uid: str = UID) -> dict[int, list[Any]]:
    """Of each subtask, in the order of their positions."""
    found: dict[int, list[Any]] = {}
    for row in snapshot.rows(uid, state):
        assert row["position"] == len(found.setdefault(row["subtask"], []))
        found[row["subtask"]].append(row["value"])
    return found


@pytest.fixture
def source(tmp_path: Path) -> hf.Snapshot:
    return hf.Snapshot(write(tmp_path, "savepoint-7", MANY, parallelism=3, canonical=True).location)


def as_json(batch: pa.RecordBatch, edit: Callable[[Any], Any]) -> pa.RecordBatch:
    texts = [msgspec.json.encode(edit(msgspec.json.decode(text))).decode() for text in batch.column("json").to_pylist()]
    return batch.drop_columns(["value"]).set_column(2, "json", pa.array(texts))


def test_an_entry_changes_where_it_is(source: hf.Snapshot, tmp_path: Path) -> None:
    def later(batch: pa.RecordBatch) -> pa.RecordBatch:
        return as_json(batch, lambda entry: [entry[0], entry[1] + 100])

    before = entries(source, "positions")
    edited = source.edit(tmp_path / "edited", uid=UID, state="positions", function=later)
    assert entries(edited, "positions") == {
        subtask: [[name, number + 100] for name, number in own] for subtask, own in before.items()
    }
    assert entries(edited, "rules") == entries(source, "rules")
    assert edited.verify().is_sound
    assert edited.metadata.properties["edited"] == f"{UID}.positions"
    assert {state.state for state in source.diff(edited).states if state.added or state.removed or state.changed} == {"positions"}


def test_entries_go_by_their_bytes_too_and_without_subtask_they_are_dealt_out(source: hf.Snapshot, tmp_path: Path) -> None:
    kept = source.edit(
        tmp_path / "kept", uid=UID, state="positions", function=lambda batch: batch.filter(pc.equal(batch["position"], 0))
    )
    assert entries(kept, "positions") == {subtask: own[:1] for subtask, own in entries(source, "positions").items()}
    frame = pa.table({"json": [f"[{number}]" for number in range(5)]})
    dealt = source.edit(tmp_path / "dealt", {(UID, "positions"): frame})
    assert entries(dealt, "positions") == {0: [[0], [1]], 1: [[2], [3]], 2: [[4]]}
    placed = pandas.DataFrame({"value": [b"\x01", b"\x02"], "subtask": [2, 2], "position": [9, 3]})
    edited = source.edit(tmp_path / "placed", {(UID, "positions"): placed})
    assert entries(edited, "positions") == {2: [2, 1]}
    none = source.edit(tmp_path / "none", uid=UID, state="positions", function=lambda batch: None)
    assert entries(none, "positions") == {}
    assert [len(state.operator) for state in none.metadata.operators[0].subtasks] == [2, 2, 2], "the state is still there"


def test_a_broadcast_state_is_shown_once_and_goes_to_all(source: hf.Snapshot, tmp_path: Path) -> None:
    seen: list[int] = []

    def more(batch: pa.RecordBatch) -> pa.Table:
        seen.append(batch.num_rows)
        return pa.concat_tables([pa.table({"json": batch["json"]}), pa.table({"json": ['"r3"']})])

    edited = source.edit(tmp_path / "edited", uid=UID, state="rules", function=more)
    assert seen == [2]
    assert entries(edited, "rules") == {subtask: ["r1", "r2", "r3"] for subtask in range(3)}
    again = edited.edit(tmp_path / "again", {(UID, "rules"): edited.table(UID, "rules").read_all()})
    assert entries(again, "rules") == entries(edited, "rules")
    copies = pa.table({"json": ['"a"', '"b"'], "subtask": [0, 1]})
    with pytest.raises(StateValueError, match="state 'rules': the copies of subtasks 0 and 1 differ"):
        source.edit(tmp_path / "wrong", {(UID, "rules"): copies})


def test_copies_that_a_job_let_differ_are_not_edited_by_a_function(source: hf.Snapshot, tmp_path: Path) -> None:
    operator = source.metadata.operators[0]
    other = InlineHandle(msgspec.msgpack.encode([b"x"]))
    handles = tuple(
        msgspec.structs.replace(handle, part=other, count=1) if handle.state.name == "rules" else handle
        for handle in operator.subtasks[1].operator
    )
    subtasks = (operator.subtasks[0], msgspec.structs.replace(operator.subtasks[1], operator=handles), operator.subtasks[2])
    metadata = msgspec.structs.replace(source.metadata, operators=(msgspec.structs.replace(operator, subtasks=subtasks),))
    stored = source._stored
    broken = type(stored)(metadata, stored.storage, stored.folder)
    change = {(UID, "rules"): change_of(UID, "rules", lambda batch: batch)}
    with pytest.raises(InvalidConfigError, match="the copies of subtasks 0 and 1 differ"):
        edit_snapshot(broken, change, LocalStorage(tmp_path), "edited", now_ms=0)
    frame = {(UID, "rules"): change_of(UID, "rules", pa.table({"value": [b"\x05"]}))}
    made = edit_snapshot(broken, frame, LocalStorage(tmp_path), "edited", now_ms=0)
    assert entries(hf.Snapshot._of(made), "rules") == {subtask: [5] for subtask in range(3)}


def test_many_entries_become_a_file(source: hf.Snapshot, tmp_path: Path) -> None:
    frame = pa.table({"value": [number.to_bytes(8, "big") * 20 for number in range(1_000)], "subtask": [1] * 1_000})
    edited = source.edit(tmp_path / "edited", {(UID, "positions"): frame})
    parts = [handle.part for state in edited.metadata.operators[0].subtasks for handle in state.operator][::2]
    assert [type(part) for part in parts] == [InlineHandle, FileHandle, InlineHandle]
    assert edited.verify().is_sound
    assert [row["value"] for row in edited.table(UID, "positions").read_all().to_pylist()] == frame["value"].to_pylist()


REFUSED: dict[str, tuple[Any, type[HoldfastError], str]] = {
    "nothing of it": (pa.table({"subtask": [0]}), InvalidConfigError, "no column 'value' or 'json'; its columns are: subtask"),
    "another column": (pa.table({"value": [b""], "key": ["a"]}), InvalidConfigError, "column 'key' is not its own"),
    "text as bytes": (pa.table({"value": ["x"]}), StateValueError, "row 0: column 'value' is string and has to be binary"),
    "a null": (pa.table({"value": pa.array([b"", None])}), StateValueError, "row 1: column 'value' is null"),
    "no JSON": (pa.table({"json": ["[1]", "["]}), StateValueError, "row 1: column 'json': "),
    "a null for JSON": (pa.table({"json": pa.array([None], pa.utf8())}), StateValueError, "row 0: column 'json' is null"),
    "a number as JSON": (pa.table({"json": [1]}), StateValueError, "column 'json' is int64 and has to be text"),
    "more than msgpack has": (pa.table({"json": [str(1 << 70)]}), StateValueError, "row 0: column 'json'"),
    "JSON of something else": (
        pa.table({"json": ["2"], "value": [b"\x01"]}),
        StateValueError,
        "row 0: 'json' is not that of 'value'",
    ),
    "JSON of what has none": (
        pa.table({"json": ["2"], "value": [b"\xc1"]}),
        StateValueError,
        "row 0: 'json' is not that of 'value'",
    ),
    "no such subtask": (pa.table({"value": [b"", b""], "subtask": [2, 3]}), StateValueError, "row 1: subtask 3 has no share"),
    "a subtask below 0": (pa.table({"value": [b""], "subtask": [-1]}), StateValueError, "row 0: column 'subtask' is -1"),
    "half a subtask": (pa.table({"value": [b""], "subtask": [0.5]}), StateValueError, "column 'subtask' is double"),
    "a null position": (
        pa.table({"value": [b""], "position": pa.array([None], pa.int32())}),
        StateValueError,
        "'position' is null",
    ),
}


@pytest.mark.parametrize(("frame", "kind", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_entry_can_be_is_refused_and_nothing_is_left(
    source: hf.Snapshot, tmp_path: Path, frame: Any, kind: type[HoldfastError], match: str
) -> None:
    before = files_below(tmp_path)
    with pytest.raises(kind, match=match) as caught:
        source.edit(tmp_path / "edited", {(UID, "positions"): frame})
    assert (caught.value.fields["operator"], caught.value.fields["state"]) == (UID, "positions")
    assert files_below(tmp_path) == before


def test_entries_that_json_would_change_are_not_taken_from_it(tmp_path: Path) -> None:
    for number, entry in enumerate(({"a": b"bytes"}, {1: "a number as key"}, [math.nan], [float(2**70)])):
        contents = Contents(count={"AA": 1}, positions=[["plain"], entry])
        source = hf.Snapshot(write(tmp_path, f"savepoint-{number}", contents, canonical=True).location)
        frame = pa.table({"json": ['["new"]']})
        if entry == [float(2**70)]:
            assert entries(source.edit(tmp_path / "edited", {(UID, "positions"): frame}), "positions") == {0: [["new"]]}
            continue
        with pytest.raises(InvalidConfigError, match="state 'positions': its entries are not the same after JSON"):
            source.edit(tmp_path / "edited", {(UID, "positions"): frame})


def test_subtask_in_some_batches_only_is_refused(source: hf.Snapshot, tmp_path: Path) -> None:
    numbers = itertools.count()

    def wavering(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if next(numbers) else batch.drop_columns(["subtask"])

    with pytest.raises(InvalidConfigError, match="column 'subtask' is there in some batches only"):
        source.edit(tmp_path / "edited", uid=UID, state="positions", function=wavering)


class _Dies(BaseException):
    pass


class _Dying(LocalStorage):
    """Dies before its n-th operation."""

    left = 1 << 30

    def execute(self, operation: Operation) -> Any:
        self.left -= 1
        if self.left < 0:
            raise _Dies
        return super().execute(operation)


def test_death_at_any_operation_leaves_no_snapshot_or_the_whole_one(source: hf.Snapshot, tmp_path: Path) -> None:
    frame = pa.table({"value": [b"x" * 30_000, b"y"], "subtask": [1, 2]})
    changes = {(UID, "positions"): change_of(UID, "positions", frame)}
    before = files_below(Path(source.location))
    for count in itertools.count():
        storage = _Dying(tmp_path / f"t{count}")
        storage.left = count
        try:
            edit_snapshot(source._stored, changes, storage, "edited", now_ms=0)
        except _Dies:
            with pytest.raises(NotFoundError):
                hf.Snapshot(tmp_path / f"t{count}" / "edited")
        else:
            break
    assert count > 10
    whole = hf.Snapshot(tmp_path / f"t{count}" / "edited")
    assert whole.verify().is_sound
    assert {subtask: len(own) for subtask, own in entries(whole, "positions").items()} == {1: 1, 2: 1}
    assert files_below(Path(source.location)) == before


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 2, 5]), st.integers(0, 50), st.binary(max_size=3)),
        max_size=30,
        unique_by=lambda row: row[:2],
    ),
    sizes=st.lists(st.integers(1, 5), min_size=1),
    kind=st.sampled_from([Redistribution.SPLIT, Redistribution.UNION]),
    placed=st.booleans(),
)
def test_every_entry_goes_to_one_subtask_in_order(rows: Any, sizes: list[int], kind: Redistribution, placed: bool) -> None:
    lists = EntryLists("op", StateMeta("s", kind.kind, "bytes"), [0, 2, 5])
    left = list(rows)
    for size in itertools.cycle(sizes):
        some, left = left[:size], left[size:]
        if not some:
            break
        columns = {"value": pa.array([value for _, _, value in some], pa.binary())}
        if placed:
            columns |= {"subtask": pa.array([each for each, _, _ in some]), "position": pa.array([each for _, each, _ in some])}
        lists.add(pa.table(columns))
    dealt = lists.dealt()
    assert list(dealt) == [0, 2, 5]
    if placed:
        for subtask, own in dealt.items():
            assert own == [value for _, _, value in sorted((row for row in rows if row[0] == subtask), key=lambda row: row[1])]
    else:
        assert [entry for own in dealt.values() for entry in own] == [value for _, _, value in rows]
        assert max(map(len, dealt.values())) - min(map(len, dealt.values())) <= 1


@pytest.mark.parametrize("subtasks", [[0, 0], None])
def test_a_position_that_two_entries_have_is_refused(subtasks: list[int] | None) -> None:
    lists = EntryLists("op", StateMeta("s", "operator_list", "bytes"), [0, 2])
    columns = {"value": pa.array([b"a", b"b"], pa.binary()), "position": pa.array([7, 7])}
    lists.add(pa.table(columns if subtasks is None else {**columns, "subtask": pa.array(subtasks)}))
    with pytest.raises(StateValueError, match="operator 'op', state 's': two rows have the position 7") as caught:
        lists.dealt()
    assert (caught.value.operator, caught.value.state) == ("op", "s")


# ----------------------------------------------------------------------------------------------------------- bootstrap

SPLIT = OperatorListStateDescriptor("offsets")
UNION = OperatorListStateDescriptor("all", Redistribution.UNION)
RULES = OperatorListStateDescriptor("rules", Redistribution.BROADCAST)
ROWS = RowType(pa.schema([("k", pa.string()), ("v", pa.int64())]))
COUNT = hf.ValueStateDescriptor("count", int)


def history(parallelism: int = 3) -> hf.Savepoint:
    counts = pa.table({"key": ["a", "b"], "value": [5, 6]})
    texts = pa.table({"text": ['{"rule": 1}', '{"rule": 2}'], "ignored": [None, None]})
    placed = pandas.DataFrame({"entry": [b"z", b"y"], "slot": [parallelism - 1, 0], "value": ["not", "this"]})
    return (
        hf.Savepoint.create(max_parallelism=8, parallelism=parallelism)
        .with_operator_state("op", SPLIT, [b"%d" % number for number in range(5)])
        .with_operator_state("op", UNION, placed, value="entry", subtask="slot")
        .with_operator_state("op", RULES, texts, json="text")
        .with_state("op", COUNT, counts)
        .with_timers("op", pa.table({"key": ["a", "b"], "time": [1_000, 2_000]}))
        .with_timers(
            "op",
            pa.table({"user": ["b"], "at": [500], "space": [b"n"]}),
            key="user",
            time="at",
            namespace="space",
            processing_time=True,
        )
    )


def test_a_savepoint_with_all_kinds_of_state(tmp_path: Path) -> None:
    made = history().write(tmp_path / "savepoint")
    assert made.verify().is_sound
    assert {name: state.kind for name, state in made.states("op").items()} == {
        "_event_time_timers": "timers",
        "_processing_time_timers": "timers",
        "all": "operator_union",
        "count": "value",
        "offsets": "operator_list",
        "rules": "operator_broadcast",
    }
    assert entries(made, "offsets", "op") == {0: [0x30, 0x31], 1: [0x32, 0x33], 2: [0x34]}
    assert entries(made, "all", "op") == {0: [0x79], 2: [0x7A]}
    assert entries(made, "rules", "op") == {subtask: [{"rule": 1}, {"rule": 2}] for subtask in range(3)}
    assert {(row["key"], row["time"]) for row in made.rows("op", "_event_time_timers")} == {("a", 1_000), ("b", 2_000)}
    lists_only = hf.Savepoint.create(max_parallelism=8).with_operator_state("src", SPLIT, []).write(tmp_path / "lists")
    assert (lists_only.states("src")["offsets"].entries, lists_only.metadata.operators[0].subtasks[0].keyed) == (0, ())


class Remembering(ProcessFunction):
    """Shows what its timers find, under both kinds of time."""

    states = (COUNT,)

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        ctx.timers.register_event_time_timer(2**40)

    def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None:
        out({"k": ctx.key, "time": timestamp_ms, "count": ctx.state(COUNT).value()})


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_timers_fire_in_a_job_that_starts_from_it(tmp_path: Path, parallelism: int) -> None:
    made = history().write(tmp_path / "savepoint")
    storage = DictStorage({f"chk/{name}": content for name, content in files_below(Path(made.location)).items()})
    operator = made.metadata.operators[0]
    snapshots = [HarnessSnapshot(state.keyed, {}, storage) for state in operator.subtasks]
    fired: dict[str, list[Any]] = {}
    for subtask in range(parallelism):
        function = ProcessOperator(Remembering(), key_selector("k", None, ROWS, "op"), ROWS, UNDECLARED)
        with OperatorHarness.restored(
            function, snapshots, parallelism=parallelism, subtask=subtask, key_type="utf8", max_parallelism=8
        ) as harness:
            for name, advance in (("processing", lambda h: h.processing_time(600)), ("event", lambda h: h.watermark(1_500))):
                advance(harness)
                fired.setdefault(name, []).extend(harness.output.rows())
                harness.output.clear()
    assert fired == {"processing": [{"k": "b", "time": 500, "count": 6}], "event": [{"k": "a", "time": 1_000, "count": 5}]}


WRONG: dict[str, tuple[Callable[[hf.Savepoint], hf.Savepoint], type[HoldfastError], str]] = {
    "keyed state": (lambda s: s.with_operator_state("op", COUNT, []), InvalidConfigError, "declares keyed state: use with_state"),  # type: ignore[arg-type]
    "no bytes": (
        lambda s: s.with_operator_state("op", SPLIT, [b"", "x"]),
        StateValueError,
        "state 'offsets', row 1: str is not bytes",
    ),
    "no entries": (
        lambda s: s.with_operator_state("op", SPLIT, b"xyz"),
        InvalidConfigError,
        "bytes is neither a sequence of bytes",
    ),
    "no such column": (
        lambda s: s.with_operator_state("op", SPLIT, pa.table({"v": [b""]})),
        InvalidConfigError,
        "state 'offsets': no column 'value' in the frame",
    ),
    "a state twice": (
        lambda s: s.with_operator_state("op", SPLIT, []).with_operator_state("op", SPLIT, []),
        InvalidConfigError,
        "state 'offsets' is given twice",
    ),
    "a timer twice": (
        lambda s: s.with_timers("op", pa.table({"key": ["a", "a"], "time": [1, 1]})),
        InvalidKeyError,
        "'_event_time_timers': two rows have",
    ),
    "a time that is none": (
        lambda s: s.with_timers("op", pa.table({"key": ["a"], "time": [1.5]})),
        StateValueError,
        "column 'time' is double and has to be int64",
    ),
    "timers without a frame": (lambda s: s.with_timers("op", [1]), InvalidConfigError, "list is no table or DataFrame"),
    "timers of another key": (
        lambda s: s.with_state("op", COUNT, pa.table({"key": ["a"], "value": [1]})).with_timers(
            "op", pa.table({"key": [1], "time": [1]})
        ),
        InvalidConfigError,
        "its states have keys of int64 and utf8",
    ),
}


@pytest.mark.parametrize(("make", "kind", "match"), WRONG.values(), ids=WRONG.keys())
def test_what_no_savepoint_can_have_is_refused(tmp_path: Path, make: Any, kind: type[HoldfastError], match: str) -> None:
    with pytest.raises(kind, match=match):
        make(hf.Savepoint.create(max_parallelism=8)).write(tmp_path / "savepoint")
    assert files_below(tmp_path) == {}


# ----------------------------------------------------------------------------------------------------- command line


def test_rows_of_a_parquet_file_on_the_command_line(source: hf.Snapshot, tmp_path: Path) -> None:
    pq.write_table(pa.table({"json": ['["new.parquet",0]']}), tmp_path / "rows.parquet")
    where = ("edit", source.location, tmp_path / "edited", "--uid", UID, "--state", "positions")
    assert run(*where, "--rows", tmp_path / "rows.parquet") == f"{tmp_path / 'edited'}\n"
    assert entries(hf.Snapshot(tmp_path / "edited"), "positions") == {0: [["new.parquet", 0]]}
    (tmp_path / "rows.txt").write_text("no Parquet")
    where = ("edit", source.location, tmp_path / "again", "--uid", UID, "--state", "positions")
    assert "rows.txt is no Parquet file that can be read" in fails(*where, "--rows", tmp_path / "rows.txt")
    assert "missing is no Parquet file" in fails(*where, "--rows", tmp_path / "missing")
    damaged = bytearray((tmp_path / "rows.parquet").read_bytes())
    damaged[4:20] = b"\xff" * 16
    (tmp_path / "rows.parquet").write_bytes(damaged)
    assert "rows.parquet can't be read" in fails(*where, "--rows", tmp_path / "rows.parquet")
    assert not (tmp_path / "again").exists()
    for arguments in ((), ("--rows", "a", "--function", "b")):
        assert runner.invoke(app, ["snapshot", *map(str, (*where, *arguments))]).exit_code == 2

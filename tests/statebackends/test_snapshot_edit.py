"""Edited snapshots: what changes, what stays, what is refused; rows in any order, in little memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.api.snapshots.frames import change_of
from holdfast.statebackends.errors import (
    CorruptStateError,
    HoldfastError,
    InvalidConfigError,
    InvalidKeyError,
    NotFoundError,
    StateValueError,
    UserFunctionError,
)
from holdfast.statebackends.handles import DELTA_FORMAT, KeyGroupRange
from holdfast.statebackends.layout import KEY_GROUP, POSITION
from holdfast.statebackends.serialization.column_types import fitted, loses_nothing
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
from holdfast.statebackends.snapshot.metadata import NATIVE_PROPERTY
from holdfast.statebackends.state_processor.conform import StateLayout
from holdfast.statebackends.state_processor.edit import edit_snapshot, layout_of
from holdfast.statebackends.state_processor.writing import KeyGroupSorter
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import Operation
from tests.examples import examples
from tests.statebackends.snapshot_harness import KEY, KINDS, SOME, UID, Contents, files_below, write

MANY = Contents(
    count={f"key-{number}": number for number in range(300)},
    seen={f"key-{number}": [str(each) for each in range(number % 4)] for number in range(300)},
    tags={f"key-{number}": {"a": number, "b": -number} for number in range(0, 300, 7)},
    windows={(f"key-{number}", 60 * (number % 3)): number for number in range(0, 300, 3)},
    timers={(f"key-{number}", number) for number in range(0, 300, 5)},
    positions=[[f"{number}.parquet", number] for number in range(9)],
    rules=["r"],
)


def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    index = batch.schema.get_field_index("value")
    return batch.set_column(index, "value", pc.multiply(batch.column("value"), 2))


def values(snapshot: hf.Snapshot, state: str = "count") -> dict[str, Any]:
    return {row["key"]: row["value"] for row in snapshot.rows(UID, state)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("canonical", [False, True])
def test_one_state_changes_and_the_others_stay(tmp_path: Path, kind: Any, canonical: bool) -> None:
    folder = "savepoint-7" if canonical else "job/chk-7"
    threshold = 0 if kind == "rocksdb" else 2_000
    stored = write(tmp_path, folder, MANY, kind=kind, parallelism=3, canonical=canonical, inline_threshold=threshold)
    source = hf.Snapshot(stored.location)
    before = files_below(Path(stored.location))
    edited = source.edit(tmp_path / "edited", uid=UID, state="count", function=doubled)
    assert values(edited) == {key: 2 * count for key, count in MANY.count.items()}
    assert files_below(Path(stored.location)) == before
    assert edited.verify().is_sound
    changed = {state.state for state in source.diff(edited).states if state.added or state.removed or state.changed}
    assert changed == {"count"}
    assert (edited.metadata.kind, edited.metadata.properties["edited"]) == ("savepoint", f"{UID}.count")
    assert {state.format for state in edited.states(UID).values()} == {"parquet", "list"}
    again = hf.Snapshot(tmp_path / "edited").edit(
        tmp_path / "again", uid=UID, state="count", function=lambda batch: batch.filter(pc.less(batch.column("value"), 0))
    )
    assert values(again) == {}
    assert sum(state.removed for state in edited.diff(again).states) == 300


def test_several_states_by_functions_and_frames(tmp_path: Path) -> None:
    source = hf.Snapshot(write(tmp_path, "savepoint-7", SOME, parallelism=2, canonical=True).location)
    table = pa.table({"key": ["DL", "AA"], "value": [7, 8]})
    edited = source.edit(
        tmp_path / "edited",
        {
            (UID, "count"): table,
            (UID, "tags"): lambda batch: batch.to_pandas().assign(value=9),
            (UID, "seen"): lambda batch: None,
            (UID, "windows"): lambda batch: batch.slice(0, 1),
            (UID, "_timers"): lambda batch: batch.drop_columns(["key_group", "namespace"]),
        },
    )
    assert values(edited) == {"DL": 7, "AA": 8}
    assert [(row["key"], row["map_key"], row["value"]) for row in edited.rows(UID, "tags")] == [
        (row["key"], row["map_key"], 9) for row in source.rows(UID, "tags")
    ]
    assert list(edited.rows(UID, "seen")) == []
    assert {(row["key"], row["time"]) for row in edited.rows(UID, "_timers")} == SOME.timers
    assert edited.metadata.properties["edited"] == ", ".join(
        f"{UID}.{name}" for name in ("_timers", "count", "seen", "tags", "windows")
    )


def test_what_is_edited_is_canonical_whatever_it_was(tmp_path: Path) -> None:
    stored = write(tmp_path, "job/chk-7", SOME, kind="rocksdb")
    metadata = msgspec.structs.replace(stored.metadata, properties={NATIVE_PROPERTY: "rocksdb", "other": "kept"})
    native = replace(stored, metadata=metadata)
    made = edit_snapshot(native, {(UID, "count"): change_of(UID, "count", doubled)}, LocalStorage(tmp_path), "edited", now_ms=0)
    assert made.metadata.properties == {"other": "kept", "edited": f"{UID}.count"}, "any backend may restore it"
    assert {handle.format for state in made.metadata.operators[0].subtasks for handle in state.keyed} == {"parquet"}


def test_keys_may_change_and_list_positions_are_counted_anew(tmp_path: Path) -> None:
    source = hf.Snapshot(write(tmp_path, "savepoint-7", SOME, parallelism=2, canonical=True).location)

    def renamed(batch: pa.RecordBatch) -> pa.Table:
        return pa.table({"key": pc.ascii_lower(batch.column("key")), "value": batch.column("value")})

    edited = source.edit(tmp_path / "a", uid=UID, state="count", function=renamed)
    assert values(edited) == {key.lower(): count for key, count in SOME.count.items()}
    for row in edited.rows(UID, "count"):
        assert row["key_group"] == KEY.key_group(row["key"], 8)
    cut = source.edit(
        tmp_path / "b", uid=UID, state="seen", function=lambda batch: batch.filter(pc.not_equal(batch.column("value"), "two"))
    )
    assert {(row["key"], row["position"], row["value"]) for row in cut.rows(UID, "seen")} == {("AA", 0, "one"), ("WN", 0, "three")}


REFUSED: list[tuple[str, str, Callable[[pa.RecordBatch], Any], type[HoldfastError], str]] = [
    (
        "null key",
        "count",
        lambda b: pa.table({"key": ["a", None], "value": [1, 2]}),
        InvalidKeyError,
        "row 1: column 'key' is null",
    ),
    ("key of another type", "count", lambda b: pa.table({"key": [1], "value": [1]}), InvalidKeyError, "state 'count'"),
    (
        "wrong key group",
        "count",
        lambda b: b.set_column(0, KEY_GROUP, pc.add(b.column(0), 1)),
        InvalidKeyError,
        "row 0: key_group is",
    ),
    (
        "text for a number",
        "count",
        lambda b: pa.table({"key": ["a"], "value": ["1"]}),
        StateValueError,
        "is string and has to be int64",
    ),
    (
        "fraction for a number",
        "count",
        lambda b: pa.table({"key": ["a"], "value": [1.0]}),
        StateValueError,
        "is double and has to be",
    ),
    (
        "flag for a number",
        "count",
        lambda b: pa.table({"key": ["a"], "value": [True]}),
        StateValueError,
        "is bool and has to be int64",
    ),
    (
        "number out of range",
        "count",
        lambda b: pa.table({"key": ["a", "b"], "value": pa.array([1, 1 << 63], pa.uint64())}),
        StateValueError,
        "row 1: column 'value'",
    ),
    ("null value", "count", lambda b: pa.table({"key": ["a", "b"], "value": [1, None]}), StateValueError, "row 1"),
    (
        "no value",
        "count",
        lambda b: pa.table({"key": ["a"]}),
        InvalidConfigError,
        "no column 'value'; its columns are: key_group, key",
    ),
    (
        "one column more",
        "count",
        lambda b: pa.table({"key": ["a"], "valeu": [1], "value": [1]}),
        InvalidConfigError,
        "column 'valeu'",
    ),
    ("a key twice", "count", lambda b: pa.table({"key": ["a", "b", "a"], "value": [1, 2, 3]}), InvalidKeyError, "two rows have"),
    (
        "an entry twice",
        "tags",
        lambda b: pa.table({"key": ["a", "a"], "map_key": ["x", "x"], "value": [1, 2]}),
        InvalidKeyError,
        "'map_key': 'x'",
    ),
    ("a timer twice", "_timers", lambda b: pa.table({"key": ["a", "a"], "time": [1, 1]}), InvalidKeyError, "'time': 1"),
    ("no frame", "count", lambda b: 5, InvalidConfigError, "int is no table or DataFrame"),
    ("a failure", "count", lambda b: 1 / 0, UserFunctionError, "raised ZeroDivisionError"),
]


@pytest.mark.parametrize(("state", "function", "kind", "match"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_rows_that_a_state_cant_have_are_refused(
    tmp_path: Path, state: str, function: Callable[[pa.RecordBatch], Any], kind: type[HoldfastError], match: str
) -> None:
    one = Contents(count={"AA": 1}, tags={"AA": {"t": 1}}, timers={("AA", 5)})
    source = hf.Snapshot(write(tmp_path, "savepoint-7", one, canonical=True).location)
    with pytest.raises(kind, match=match) as caught:
        source.edit(tmp_path / "edited", uid=UID, state=state, function=function)
    assert (caught.value.fields["operator"], caught.value.fields["state"]) == (UID, state)
    assert not (tmp_path / "edited").exists()


def test_pandas_objects_that_do_not_fit_are_named(tmp_path: Path) -> None:
    import pandas

    source = hf.Snapshot(write(tmp_path, "savepoint-7", SOME, canonical=True).location)
    frame = pandas.DataFrame({"key": ["a", "b"], "value": pandas.Series([1, "two"], dtype=object)})
    with pytest.raises(StateValueError, match=r"state 'count', row 1: column 'value'"):
        source.edit(tmp_path / "edited", {(UID, "count"): frame})
    labels = pandas.DataFrame({"key": ["a"], "value": [[("x", ["b"])]]})
    edited = source.edit(tmp_path / "edited", {(UID, "labels"): labels})
    assert [(row["key"], row["value"]) for row in edited.rows(UID, "labels")] == [("a", [("x", ["b"])])]


def test_what_cant_be_edited_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = hf.Snapshot(write(tmp_path, "savepoint-7", SOME, canonical=True).location)
    for uid, state, kind, match in (
        (UID, "cuont", NotFoundError, "no state 'cuont'"),
        ("total", "count", NotFoundError, "no operator 'total'"),
    ):
        with pytest.raises(kind, match=match):
            source.edit(tmp_path / "edited", {(uid, state): doubled})
    with pytest.raises(InvalidConfigError, match="nothing to edit"):
        source.edit(tmp_path / "edited")
    with pytest.raises(InvalidConfigError, match="Give uid and state"):
        source.edit(tmp_path / "edited", function=doubled)
    with pytest.raises(InvalidConfigError, match="lies in the snapshot itself"):
        source.edit(Path(source.location) / "new", {(UID, "count"): doubled})
    taken = source.copy(tmp_path / "taken").location
    with pytest.raises(InvalidConfigError, match="holds a snapshot"):
        source.edit(taken, {(UID, "count"): doubled})
    part = next(Path(source.location).glob("*tags*"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CorruptStateError, match="tags"):
        source.edit(tmp_path / "edited", {(UID, "count"): doubled})
    assert not (tmp_path / "edited").exists()


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


def test_death_at_any_operation_leaves_no_snapshot_or_the_whole_one(tmp_path: Path) -> None:
    stored = write(tmp_path, "savepoint-7", SOME, parallelism=2, canonical=True)
    source = hf.Snapshot(stored.location)
    before = files_below(Path(stored.location))
    for count in itertools.count():
        storage = _Dying(tmp_path / f"t{count}")
        storage.left = count
        try:
            edit_snapshot(source._stored, {(UID, "count"): change_of(UID, "count", doubled)}, storage, "edited", now_ms=0)
        except _Dies:
            with pytest.raises(NotFoundError):
                hf.Snapshot(tmp_path / f"t{count}" / "edited")
        else:
            break
    assert count > 10
    assert values(hf.Snapshot(tmp_path / f"t{count}" / "edited")) == {key: 2 * value for key, value in SOME.count.items()}
    assert files_below(Path(stored.location)) == before


# ------------------------------------------------------------------------------------------------------------ sorting


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StateLayout]:
    stored = write(tmp_path_factory.mktemp("layouts"), "savepoint-7", SOME, max_parallelism=128, canonical=True)
    with stored.reader() as reader:
        return {name: layout_of(reader, stored.state(UID, name)) for name in ("count", "seen")}


ROWS = st.lists(st.tuples(st.text("abcdef", max_size=3), st.integers(0, 5)), max_size=60)


@settings(max_examples=examples(60), deadline=None)
@given(rows=ROWS, sizes=st.lists(st.integers(1, 7), min_size=1), held=st.sampled_from([0, 200, 1 << 30]), cut=st.integers(0, 128))
def test_rows_in_any_order_come_back_in_the_order_of_key_groups(
    layouts: dict[str, StateLayout], tmp_path_factory: pytest.TempPathFactory, rows: Any, sizes: Any, held: int, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("sorting")
    numbers = itertools.count()
    sorter = KeyGroupSorter(layouts["seen"], lambda kind: str(folder / f"{kind}-{next(numbers)}"), held_bytes_max=held)
    left = list(rows)
    for size in itertools.cycle(sizes):
        some, left = left[:size], left[size:]
        if not some:
            break
        sorter.add(pa.table({"key": [key for key, _ in some], "value": [str(value) for _, value in some]}))
    found = [
        row
        for groups in (KeyGroupRange(0, cut), KeyGroupRange(cut, 128))
        for table in sorter.tables(groups)
        for row in table.to_pylist()
    ]
    assert [row[KEY_GROUP] for row in found] == sorted(KEY.key_group(key, 128) for key, _ in rows)
    lists: dict[str, list[str]] = {}
    for row in found:
        assert row[POSITION] == len(lists.setdefault(row["key"], []))
        lists[row["key"]].append(row["value"])
    expected: dict[str, list[str]] = {}
    for key, value in rows:
        expected.setdefault(key, []).append(str(value))
    assert lists == expected


def test_a_key_in_two_batches_is_found_twice_behind_files_too(layouts: dict[str, StateLayout], tmp_path: Path) -> None:
    numbers = itertools.count()
    sorter = KeyGroupSorter(layouts["count"], lambda kind: str(tmp_path / f"{kind}-{next(numbers)}"), held_bytes_max=0)

    def batches() -> Iterator[pa.Table]:
        for start in range(0, 100, 10):
            yield pa.table({"key": [f"k{number}" for number in range(start, start + 11)], "value": list(range(11))})

    for batch in batches():
        sorter.add(batch)
    with pytest.raises(InvalidKeyError, match="two rows have"):
        list(sorter.tables(KeyGroupRange(0, 128)))


@pytest.mark.parametrize(
    ("found", "wanted", "fits"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.uint64(), pa.int64(), True),
        (pa.int64(), pa.float64(), True),
        (pa.decimal128(10, 2), pa.string(), False),
        (pa.decimal128(10, 2), pa.float64(), False),
        (pa.float64(), pa.int64(), False),
        (pa.float32(), pa.float64(), True),
        (pa.float64(), pa.float32(), False),
        (pa.bool_(), pa.int64(), False),
        (pa.string(), pa.int64(), False),
        (pa.large_string(), pa.string(), True),
        (pa.string(), pa.binary(), False),
        (pa.null(), pa.int64(), True),
        (pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC"), True),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), False),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), True),
        (pa.list_(pa.string()), pa.list_(pa.int64()), False),
        (pa.struct({"a": pa.int32()}), pa.struct({"a": pa.int64()}), True),
        (pa.struct({"b": pa.int64()}), pa.struct({"a": pa.int64()}), False),
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.string(), pa.int64()), True),
        (pa.map_(pa.string(), pa.string()), pa.map_(pa.string(), pa.int64()), False),
    ],
)
def test_what_may_be_cast(found: pa.DataType, wanted: pa.DataType, fits: bool) -> None:
    assert loses_nothing(found, wanted) is fits


@pytest.mark.parametrize(
    ("found", "text", "fits"),
    [
        (pa.decimal128(10, 2), "decimal", True),
        (pa.decimal256(60, -2), "optional<decimal>", True),
        (pa.int64(), "decimal", True),
        (pa.float64(), "decimal", False),
        (pa.bool_(), "decimal", False),
        (pa.decimal128(10, 2), "str", False),
        (pa.list_(pa.decimal128(10, 2)), "list<decimal>", True),
        (pa.list_(pa.decimal128(10, 2)), "list<str>", False),
        (pa.map_(pa.string(), pa.int32()), "dict<str,decimal>", True),
        (pa.map_(pa.int32(), pa.string()), "dict<decimal,str>", True),
        (pa.struct({"a": pa.decimal128(5, 1), "b": pa.int8()}), "struct<a: decimal, b: float>", True),
        (pa.struct({"a": pa.int8(), "b": pa.decimal128(5, 1)}), "struct<a: decimal, b: float>", False),
    ],
)
def test_what_may_be_cast_to_values_that_are_decimals(found: pa.DataType, text: str, fits: bool) -> None:
    spec = TypeSerializer.parse(text)
    assert loses_nothing(found, spec.arrow_type, spec.value_type) is fits
    if fits:
        assert fitted(pa.array([None], found), spec.arrow_type, spec.value_type).type == spec.arrow_type


def test_a_dictionary_is_judged_before_each_value_gets_bytes_of_its_own() -> None:
    """50,000 values of 300 kB: what a cast to the dictionary's own type would take first."""
    numbers, wide = pa.array([0] * 50_000, pa.int32()), pa.array([b"x" * 300_000], pa.binary(300_000))
    for values in (wide, wide.cast(pa.binary()), pa.array([["x" * 300_000]])):
        with pytest.raises(ValueError, match=r"it is dictionary<.* and has to be int64"):
            fitted(pa.DictionaryArray.from_arrays(numbers, values), pa.int64())


# ---------------------------------------------------------------------------------------------------------- deltas


def golden_chains() -> list[Path]:
    """Checkpoints whose tables have deltas on them."""
    found = []
    for path in sorted((Path(__file__).parents[1] / "golden/snapshots").rglob("_metadata")):
        operators = hf.Snapshot(path).metadata.operators
        if any(handle.format == DELTA_FORMAT for operator in operators for state in operator.subtasks for handle in state.keyed):
            found.append(path.parent)
    return found


def test_delta_runs_are_folded_into_the_tables_edited_and_not(tmp_path: Path) -> None:
    chains = golden_chains()
    assert chains
    for number, folder in enumerate(chains):
        snapshot = hf.Snapshot(folder)
        for uid, operator in snapshot.operators.items():
            for name in [name for name, state in operator.states.items() if state.key_type is not None][:2]:
                target = tmp_path / f"{number}-{uid}-{name}"
                snapshot.edit(target, uid=uid, state=name, function=lambda batch: batch)
                edited = hf.Snapshot(target)
                assert edited.verify().is_sound
                assert snapshot.diff(edited).is_same, (folder, uid, name)
                assert snapshot.states(uid)[name].format == "arrow"
                assert edited.states(uid)[name].format == "parquet"

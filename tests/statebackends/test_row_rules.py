"""One rule of what a row must be: restores, inspect, export, diff and Spark's source refuse the same rows, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from holdfast.operators.spark.datasource.state import ReadOptions, StateReader
from holdfast.statebackends.errors import CorruptStateError, HoldfastError, InvalidConfigError
from holdfast.statebackends.factory import BackendKind, create_keyed_backend
from holdfast.statebackends.handles import KeyedStateHandle, StateMeta
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.serialization.state_serializer import state_meta
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
from holdfast.statebackends.snapshot.row_rules import RowRules
from holdfast.statebackends.snapshot.sources import timer_meta
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor, StateDescriptor
from holdfast.statebackends.storage.directory import LocalStorage
from tests.statebackends.foreign_tables import GROUPS, KEY, describe_table
from tests.statebackends.snapshot_harness import KINDS

TIMERS = "_event_time_timers"
Columns = dict[str, Any]


@dataclass
class Foreign:
    """A savepoint of one state whose rows another tool has written."""

    folder: Path
    state: str
    descriptors: tuple[StateDescriptor, ...]
    handle: KeyedStateHandle

    def restore(self, kind: BackendKind, local: Path) -> None:
        backend = create_keyed_backend(
            kind, descriptors=self.descriptors, key_type=KEY, key_groups=GROUPS, max_parallelism=8, operator="op", subtask=0,
            local_dir=str(local),
        )  # fmt: skip
        try:
            backend.restore([self.handle], LocalStorage(self.folder.parent), self.folder.name)
            if not self.descriptors:  # timers are read when their owner asks for them
                backend.register_timers(TIMERS, TimerRows(CopyOnWriteStateTable(), lambda rows: None))
        finally:
            backend.dispose()

    def readers(self, tmp: Path) -> dict[str, Callable[[], object]]:
        snapshot = hf.Snapshot(self.folder)
        spark = StateReader(ReadOptions(str(self.folder), "op", self.state))
        readers: dict[str, Callable[[], object]] = {
            "inspect": lambda: list(snapshot.rows("op", self.state)),
            "one column": lambda: snapshot.table("op", self.state, columns=["key_group"]).read_all(),
            "export": lambda: snapshot.export(tmp / "exported"),
            "diff": lambda: snapshot.diff(snapshot),
            "Spark": lambda: [list(spark.read(each)) for each in spark.partitions()],
        }
        for kind in KINDS:
            readers[kind] = lambda kind=kind: self.restore(kind, tmp / kind)  # type: ignore[misc]
        return readers


def foreign(tmp_path: Path, descriptor: StateDescriptor | None, columns: Columns) -> Foreign:
    meta = timer_meta(TIMERS, KEY) if descriptor is None else state_meta(descriptor, KEY)
    keys = columns["key"]
    arrays = {
        "key_group": pa.array([KEY.key_group(key, 8) for key in keys], pa.int32()),
        "namespace": pa.array([b""] * len(keys), pa.binary()),
        **columns,
    }
    folder = tmp_path / "savepoint-1"
    folder.mkdir()
    pq.write_table(pa.table(arrays), folder / "rows.parquet")
    handle = describe_table(folder / "rows.parquet", "parquet", meta)
    return Foreign(folder, meta.name, () if descriptor is None else (descriptor,), handle)


COUNT = hf.ValueStateDescriptor("s", int)
PRICE = hf.ValueStateDescriptor("s", Decimal)
NAMED = hf.ValueStateDescriptor("s", str)
DAYS = hf.ListStateDescriptor("s", date)
BY_PRICE = hf.MapStateDescriptor("s", Decimal, int)
BY_FLOAT = hf.MapStateDescriptor("s", float, int)
BY_PAIR = hf.MapStateDescriptor("s", tuple[float, str], int)
COUNTS = hf.ValueStateDescriptor("s", dict[str, int])
WINDOWS = ColumnarStateDescriptor("s", (ColumnAggregate("count", None, "n"),))
BAD_TEXT = pa.Array.from_buffers(pa.utf8(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])
PAIRS = pa.map_(pa.utf8(), pa.int64())
WRONG: dict[str, tuple[StateDescriptor | None, Columns, str]] = {
    "a key twice": (COUNT, {"key": ["a", "b", "a"], "value": [1, 2, 3]}, r"two rows have {'key': 'a', 'namespace': b''}"),
    "a key in another group": (
        COUNT,
        {"key": ["a"], "key_group": pa.array([(KEY.key_group("a", 8) + 1) % 8], pa.int32()), "value": [1]},
        "1 rows have a wrong key_group: that of key 'a' is",
    ),
    "a value that is missing": (COUNT, {"key": ["a", "b"], "value": [None, 1]}, "column 'value': null in a column of int"),
    "a text for a number": (COUNT, {"key": ["a"], "value": ["1"]}, "column 'value': it is string and has to be int64"),
    "a text that is no decimal": (PRICE, {"key": ["a", "b"], "value": ["1.5", "one"]}, "column 'value': 'one' is no decimal"),
    "a text that is none": (NAMED, {"key": ["a"], "value": BAD_TEXT}, "column 'value': .*[Uu][Tt][Ff]-?8"),
    "a day of no year": (
        DAYS,
        {"key": ["a"], "position": pa.array([0], pa.int32()), "value": pa.array([10**8], pa.int32()).cast(pa.date32())},
        r"a date outside of the years 1\.\.9999",
    ),
    "one decimal in two spellings": (
        BY_PRICE,
        {"key": ["a", "a"], "map_key": ["1.0", "1.00"], "value": [1, 2]},
        r"two rows have {'key': 'a', 'namespace': b'', 'map_key': '1.00'}",
    ),
    "one zero in two spellings": (
        BY_FLOAT,
        {"key": ["a", "a"], "map_key": [0.0, -0.0], "value": [1, 2]},
        "two rows have .*'map_key': -0.0",
    ),
    "one pair in two spellings": (
        BY_PAIR,
        {"key": ["a", "a"], "map_key": [{"0": 0.0, "1": "x"}, {"0": -0.0, "1": "x"}], "value": [1, 2]},
        "two rows have .*'map_key': {'0': -0.0, '1': 'x'}",
    ),
    "a dict with a key twice": (
        COUNTS,
        {"key": ["a"], "value": pa.array([[("x", 1), ("x", 2)]], PAIRS)},
        "dict<str,int> with a key that it has twice",
    ),
    "a timer twice": (None, {"key": ["a", "a"], "time": [5, 5]}, "two rows have .*'time': 5"),
    "a timer without a time": (None, {"key": ["a"], "time": pa.array([None], pa.int64())}, "null in column 'time'"),
    "a window twice": (
        WINDOWS,
        {"key": ["a", "a"], "namespace": pa.array([60, 60], pa.int64()), "n": [1, 2]},
        "two rows have {'key': 'a', 'namespace': 60}",
    ),
    "a count that is missing": (
        WINDOWS,
        {"key": ["a"], "namespace": pa.array([60], pa.int64()), "n": pa.array([None], pa.int64())},
        "null in column 'n'",
    ),
    "no value": (COUNT, {"key": ["a"]}, "no column 'value'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_row_may_be_is_refused_by_all_with_the_same_words(tmp_path: Path, name: str) -> None:
    descriptor, columns, words = WRONG[name]
    for reader, read in foreign(tmp_path, descriptor, columns).readers(tmp_path).items():
        if reader == "one column" and "two rows" not in words and "key_group" not in words:
            continue  # values that nobody asks for are not read
        with pytest.raises(CorruptStateError, match=words) as caught:
            read()
        assert caught.value.fields["operator"] == "op", reader
        assert "rows.parquet" in str(caught.value), reader


RIGHT: dict[str, tuple[StateDescriptor | None, Columns]] = {
    "a key in two namespaces": (COUNT, {"key": ["a", "a"], "namespace": [b"x", b"y"], "value": [1, 2]}),
    "keys of one hash": (COUNT, {"key": ["Aa", "BB"], "value": [1, 2]}),
    "narrower and wider numbers": (COUNT, {"key": ["a"], "value": pa.array([1], pa.uint8())}),
    "numbers for decimals": (PRICE, {"key": ["a"], "value": pa.array([Decimal("1.50")], pa.decimal128(9, 2))}),
    "integers for floats": (hf.ValueStateDescriptor("s", float), {"key": ["a"], "value": [2**53]}),
    "a dictionary": (NAMED, {"key": pa.array(["a", "b"]).dictionary_encode(), "value": pa.array(["x", "x"]).dictionary_encode()}),
    "NaN, which no other one is": (BY_FLOAT, {"key": ["a"], "map_key": [float("nan")], "value": [1]}),
    "two decimals": (BY_PRICE, {"key": ["a", "a"], "map_key": ["1.0", "1.01"], "value": [1, 2]}),
    "timers of one key": (None, {"key": ["a", "a"], "time": [5, 6]}),
    "a window of two keys": (WINDOWS, {"key": ["a", "b"], "namespace": pa.array([60, 60], pa.int64()), "n": [1, 2]}),
    "nothing": (COUNT, {"key": pa.array([], pa.utf8()), "value": pa.array([], pa.int64())}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_a_row_may_be_is_taken_by_all(tmp_path: Path, name: str) -> None:
    descriptor, columns = RIGHT[name]
    for key in ("key", "value"):
        if key == "key" and isinstance(columns[key], pa.DictionaryArray):
            columns = {**columns, "key_group": pa.array([KEY.key_group(each, 8) for each in columns[key].to_pylist()], pa.int32())}
    plain = {**columns, "key": columns["key"].to_pylist() if isinstance(columns["key"], pa.Array) else columns["key"]}
    for reader, read in foreign(tmp_path, descriptor, plain).readers(tmp_path).items():
        try:
            read()
        except HoldfastError as error:
            raise AssertionError(reader) from error


def test_two_nans_are_two_entries_of_a_map_as_python_has_it() -> None:
    rules = RowRules.of(StateMeta("s", "map", "map<float,int>", "utf8"), KEY, 8)
    table = pa.table(
        {
            "key_group": pa.array([KEY.key_group("a", 8)] * 2, pa.int32()),
            "key": ["a", "a"],
            "namespace": pa.array([b"", b""], pa.binary()),
            "map_key": [float("nan"), float("nan")],
            "value": [1, 2],
        }
    )
    assert rules.repeated(rules.judged(table)) is None


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("decimal", ["1", "-1.50", "1E+3", "1E-7", "NaN", "sNaN", "Infinity", "", "x", "1e", "1E+99999999999999999999", "--1"]),
        ("optional<decimal>", [None, "1", "y"]),
        ("list<decimal>", [["1"], [], ["z"], None]),
        ("struct<a: decimal, b: optional<int>>", [{"a": "1", "b": None}, {"a": None, "b": 1}, {"a": "q", "b": 1}]),
        ("struct<a: int = default>", [{"a": 1}, {"a": None}]),
        ("uuid", [msgspec.msgpack.encode("00000000-0000-0000-0000-000000000005"), b"\xa1x", b"", None]),
        ("union<int,str>", [msgspec.msgpack.encode(5), msgspec.msgpack.encode(b"x"), b"\xc1"]),
        ("date", [date(2020, 1, 1), None]),
        ("dict<decimal,int>", [[("1", 1), ("2", 2)], [("1", 1), ("x", 1)]]),
        ("tuple<int,str>", [{"0": 1, "1": "a"}, {"0": None, "1": "a"}]),
    ],
)  # fmt: skip
def test_a_column_is_refused_just_where_its_values_do_not_decode(text: str, values: list[Any]) -> None:
    spec = TypeSerializer.parse(text)
    for value in values:
        array = pa.array([value], spec.arrow_type)
        verdicts = []
        for judge in (spec.value_type.check_column, spec.value_type.from_arrow):
            try:
                judge(array)
                verdicts.append(True)
            except CorruptStateError:
                verdicts.append(False)
        assert verdicts[0] == verdicts[1], value


def test_the_columns_of_columnar_state_are_read_from_its_text() -> None:
    from holdfast.statebackends.columnar.accumulators import part_columns_of_text, value_type_text
    from holdfast.statebackends.columnar.state import part_fields_of

    aggregates = (
        ColumnAggregate("count", None, "n=count,m"),
        ColumnAggregate("mean", "v", "m", pa.float64()),
        ColumnAggregate("sum", "v", "m.s", pa.int32()),
        ColumnAggregate("max", "v", "a", pa.float32()),
    )
    descriptor = ColumnarStateDescriptor("s", aggregates)
    fields = part_fields_of(descriptor)
    names = [field.name for field in fields]
    assert part_columns_of_text(value_type_text(descriptor), [*reversed(names), "more"]) == fields
    assert part_columns_of_text(value_type_text(descriptor), names[1:]) is None
    assert part_columns_of_text("columnar<x=median(int64)>", ["x"]) is None


def test_a_type_that_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidConfigError):
        RowRules.of(StateMeta("s", "value", "quark", "utf8"), KEY, 8)

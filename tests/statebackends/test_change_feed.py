"""The change feed between two snapshots against what was written, and the table of their metadata."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, NotFoundError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.state_processor.change_feed import ChangeFeed
from holdfast.statebackends.state_processor.contents import metadata_table
from tests.statebackends.snapshot_harness import KINDS, SOME, UID, Contents, write

OLD = Contents(
    count={f"key-{number}": number for number in range(60)},
    seen={"a": ["one"], "b": ["two", "three"], "c": ["same", "again"]},
    tags={"a": {"t": 1, "u": 2}, "b": {"t": 3}},
    windows={("a", 60): 5, ("a", 120): 6, ("b", 60): 7},
    timers={("a", 1_000), ("b", -5)},
    positions=[["a.parquet", 10], ["b.parquet", 0]],
)
NEW = Contents(
    count={f"key-{number}": number * (1 + number % 3) for number in range(20, 90)},
    seen={"a": ["one", "more"], "c": ["same", "again"], "d": ["new"]},
    tags={"a": {"t": 1, "u": 9}, "c": {"t": 3}},
    windows={("a", 60): 5, ("a", 120): 8, ("c", 60): 1},
    timers={("a", 1_000), ("b", 7)},
    positions=[["a.parquet", 10], ["b.parquet", 1]],
)


def pair(tmp_path: Path, kinds: tuple[Any, Any] = ("memory", "memory"), groups: int = 8) -> tuple[hf.Snapshot, hf.Snapshot]:
    old = write(tmp_path, "job/chk-7", OLD, kind=kinds[0], parallelism=2)
    new = write(tmp_path, "savepoint-8", NEW, kind=kinds[1], parallelism=3, max_parallelism=groups, canonical=True)
    return hf.Snapshot(old.location), hf.Snapshot(new.location)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [8, 32])
def test_every_change_is_a_typed_row(tmp_path: Path, kind: Any, groups: int) -> None:
    old, new = pair(tmp_path, ("rocksdb" if kind == "memory" else "memory", kind), groups)
    feed = old.changes(new, UID, "count")
    assert feed.schema.names == ["change", "key", "namespace", "before_value", "after_value"]
    assert feed.schema.field("before_value").type == pa.int64()
    rows = feed.read_all().to_pylist()
    expected: set[tuple[Any, ...]] = {("removed", key, value, None) for key, value in OLD.count.items() if key not in NEW.count}
    expected |= {("added", key, None, value) for key, value in NEW.count.items() if key not in OLD.count}
    expected |= {("changed", key, OLD.count[key], new) for key, new in NEW.count.items() if OLD.count.get(key, new) != new}
    assert {(row["change"], row["key"], row["before_value"], row["after_value"]) for row in rows} == expected
    assert len(rows) == len(expected)
    counted = Counter(row["change"] for row in rows)
    diff = old.diff(new, uid=UID, state="count").states[0]
    assert (counted["added"], counted["removed"], counted["changed"]) == (diff.added, diff.removed, diff.changed)


def test_lists_maps_windows_timers_and_entries(tmp_path: Path) -> None:
    old, new = pair(tmp_path)

    def rows(state: str, *names: str) -> set[Any]:
        return {
            tuple(_frozen(row[name]) for name in ("change", *names)) for row in old.changes(new, UID, state).read_all().to_pylist()
        }

    assert rows("seen", "key", "before_value", "after_value") == {
        ("removed", "b", ("two", "three"), None),
        ("added", "d", None, ("new",)),
        ("changed", "a", ("one",), ("one", "more")),
    }
    assert rows("tags", "key", "map_key", "before_value", "after_value") == {
        ("removed", "b", "t", 3, None),
        ("added", "c", "t", None, 3),
        ("changed", "a", "u", 2, 9),
    }
    assert rows("windows", "key", "namespace", "before_sum_v", "after_sum_v") == {
        ("removed", "b", 60, 7, None),
        ("added", "c", 60, None, 1),
        ("changed", "a", 120, 6, 8),
    }
    assert rows("_timers", "key", "time") == {("removed", "b", -5), ("added", "b", 7)}
    assert rows("positions", "json") == {("removed", '["b.parquet",0]'), ("added", '["b.parquet",1]')}
    assert list(new.changes(new, UID, "count")) == []


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def test_values_keep_their_types(tmp_path: Path) -> None:
    seen = hf.ValueStateDescriptor("seen", datetime)
    times = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2)]
    made = [
        hf.Savepoint.create(max_parallelism=8)
        .with_state("t", seen, pa.table({"key": [1], "value": [time]}))
        .write(tmp_path / str(time.day))
        for time in times
    ]
    feed = made[0].changes(made[1], "t", "seen")
    assert feed.schema.field("after_value").type == pa.timestamp("us", tz="UTC")
    assert [(row["before_value"], row["after_value"]) for row in feed.read_all().to_pylist()] == [tuple(times)]


def test_a_state_on_one_side_and_one_that_became_another(tmp_path: Path) -> None:
    one = pa.table({"key": ["a"], "value": [1]})
    count, text = hf.ValueStateDescriptor("count", int), hf.ListStateDescriptor("count", int)
    old = hf.Savepoint.create(max_parallelism=8).with_state("one", count, one).write(tmp_path / "a")
    new = hf.Savepoint.create(max_parallelism=8).with_state("two", count, one).with_state("one", text, one).write(tmp_path / "b")
    assert [
        (row["change"], row["before_value"], row["after_value"]) for row in old.changes(new, "two", "count").read_all().to_pylist()
    ] == [("added", None, 1)]
    assert [row["change"] for row in new.changes(old, "two", "count").read_all().to_pylist()] == ["removed"]
    with pytest.raises(InvalidConfigError, match="value state by utf8 before, list state by utf8 after"):
        old.changes(new, "one", "count")
    with pytest.raises(NotFoundError, match="neither snapshot has a state 'x' of an operator 'one'"):
        old.changes(new, "one", "x")


def test_key_groups_of_a_feed_are_its_parts(tmp_path: Path) -> None:
    old, new = pair(tmp_path)
    feed = ChangeFeed.of(old._stored, new._stored, UID, "count")
    parts = [
        row for start in range(0, 8, 2) for batch in feed.batches(KeyGroupRange(start, start + 2)) for row in batch.to_pylist()
    ]
    assert parts == old.changes(new, UID, "count").read_all().to_pylist()
    assert len(parts) > 60


def test_metadata_as_a_table(tmp_path: Path) -> None:
    old, new = pair(tmp_path)
    table = new.metadata_table()
    frame = table.to_pandas().set_index("state")
    assert list(frame.index) == ["_timers", "count", "labels", "positions", "rules", "seen", "tags", "windows"]
    row = frame.loc["tags"]
    assert (row["operator"], row["name"], row["parallelism"], row["max_parallelism"]) == (UID, "Totals", 3, 8)
    assert (row["kind"], row["key_type"], row["value_type"], row["format"]) == ("map", "utf8", "map<str,int>", "parquet")
    assert frame["size"].sum() == new.metadata.size
    assert frame.loc["positions"]["entries"] == 2
    empty = hf.Savepoint.from_snapshot(old)
    for name in old.states(UID):
        empty = empty.without_state(UID, name)
    rows = empty.write(tmp_path / "empty").metadata_table().to_pylist()
    assert [(each["operator"], each["state"], each["size"]) for each in rows] == [(UID, None, None)]


def test_sizes_that_no_file_has_are_damage(tmp_path: Path) -> None:
    found = write(tmp_path, "savepoint-1", SOME, canonical=True)
    (operator,) = found.metadata.operators
    (subtask,) = operator.subtasks
    (first, *others) = subtask.keyed
    parts = tuple(msgspec.structs.replace(part, length=2**63) for part in first.parts)
    lying = msgspec.structs.replace(subtask, keyed=(msgspec.structs.replace(first, parts=parts), *others))
    operators = (msgspec.structs.replace(operator, subtasks=(lying,)),)
    with pytest.raises(CorruptStateError, match="savepoint-1: files of more than 2\\^63 bytes"):
        metadata_table(replace(found, metadata=msgspec.structs.replace(found.metadata, operators=operators)))

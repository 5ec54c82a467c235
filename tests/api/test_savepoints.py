"""`hf.Savepoint`: states made of frames, read back by every backend; what is refused, and where."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pandas
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, InvalidKeyError, StateValueError
from holdfast.statebackends.factory import create_keyed_backend
from holdfast.statebackends.keygroups import assign_key_groups, operator_id
from holdfast.statebackends.redistribute import keyed_redistribute
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor, OperatorListStateDescriptor
from holdfast.statebackends.storage.directory import LocalStorage
from tests.statebackends.snapshot_harness import _SETTINGS, KINDS, files_below

COUNT = hf.ValueStateDescriptor("count", int)
SEEN = hf.ListStateDescriptor("seen", str)
TAGS = hf.MapStateDescriptor("tags", str, int)
WINDOWS = ColumnarStateDescriptor("windows", (ColumnAggregate("sum", "v", "sum_v", pa.int64()),))


class Order(msgspec.Struct):
    total: int
    note: str | None = None


LAST = hf.ValueStateDescriptor("last", Order)

COUNTS = {f"user-{number}": number for number in range(200)}
FRAME = pa.table({"user": list(COUNTS), "total": list(COUNTS.values()), "ignored": [None] * len(COUNTS)})


def history(parallelism: int = 3, max_parallelism: int = 16) -> hf.Savepoint:
    seen = pandas.DataFrame({"key": ["user-1", "user-2", "user-1"], "value": ["a", "b", "c"]})
    tags = pa.table({"key": ["user-1", "user-1"], "tag": ["x", "y"], "value": pa.array([1, 2], pa.int32())})
    last = pa.table({"key": ["user-5"], "value": [{"total": 7, "note": None}]})
    windows = pa.table({"key": ["user-1", "user-1"], "start": [60, 120], "sum_v": [5, 6]})
    return (
        hf.Savepoint.create(max_parallelism=max_parallelism, parallelism=parallelism, job_name="history")
        .with_state("totals", COUNT, FRAME, key="user", value="total")
        .with_state("totals", SEEN, seen)
        .with_state("totals", TAGS, tags, map_key="tag")
        .with_state("totals", LAST, last)
        .with_state("windows", WINDOWS, windows, namespace="start", key_type=str)
    )


def test_what_was_given_is_in_the_savepoint(tmp_path: Path) -> None:
    written = history().write(tmp_path / "savepoint")
    snapshot = hf.Snapshot(tmp_path / "savepoint")
    assert snapshot.metadata == written.metadata
    assert snapshot.verify().is_sound
    assert (snapshot.metadata.kind, snapshot.metadata.checkpoint_id, snapshot.metadata.job_name) == ("savepoint", 1, "history")
    totals = snapshot.metadata.operators[0]
    assert (totals.uid, totals.operator_id, totals.parallelism, totals.max_parallelism) == ("totals", operator_id("totals"), 3, 16)
    assert {row["key"]: row["value"] for row in snapshot.rows("totals", "count")} == COUNTS
    key_type = KeyType.of(str)
    assert all(row["key_group"] == key_type.key_group(row["key"], 16) for row in snapshot.rows("totals", "count"))
    assert {(row["key"], row["position"], row["value"]) for row in snapshot.rows("totals", "seen")} == {
        ("user-1", 0, "a"),
        ("user-1", 1, "c"),
        ("user-2", 0, "b"),
    }
    assert {(row["namespace"], row["sum_v"]) for row in snapshot.rows("windows", "windows")} == {(60, 5), (120, 6)}
    assert history(parallelism=1).write(tmp_path / "again").diff(snapshot).is_same


@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_restores_it_at_any_parallelism(tmp_path: Path, kind: Any) -> None:
    written = history().write(tmp_path / "savepoint")
    totals = written.metadata.operators[0]
    found: dict[str, Any] = {}
    for subtask, shares in enumerate(keyed_redistribute(totals.subtasks, 16, 2)):
        groups = assign_key_groups(16, 2, subtask)
        backend = create_keyed_backend(
            kind,
            descriptors=(COUNT, SEEN, TAGS, LAST),
            key_type=KeyType.of(str),
            key_groups=groups,
            max_parallelism=16,
            operator="totals",
            subtask=subtask,
            local_dir=str(tmp_path / f"local-{subtask}"),
            settings=_SETTINGS,
        )
        backend.restore([share.handle for share in shares], LocalStorage(tmp_path), "savepoint")
        for key in COUNTS:
            group = KeyType.of(str).key_group(key, 16)
            if group in groups:
                backend.set_current_key(KeyType.of(str).encode(key), group)
                states = [backend.get_state(descriptor) for descriptor in (COUNT, SEEN, TAGS, LAST)]
                found[key] = (states[0].value(), list(states[1].get() or []), dict(states[2].items()), states[3].value())
        backend.dispose()
    assert {key: values[0] for key, values in found.items()} == COUNTS
    assert found["user-1"] == (1, ["a", "c"], {"x": 1, "y": 2}, None)
    assert found["user-5"][3] == Order(7)


def test_windows_as_the_documentation_describes_them_fit_the_job_that_declares_them(tmp_path: Path) -> None:
    schema = pa.schema([("user", pa.string()), ("delay", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])
    env = hf.Environment("history")
    rows = env.from_source(hf.GeneratorSource(lambda numbers: pa.RecordBatch.from_pydict({}), 1, schema)).uid("rows")
    keyed = rows.assign_timestamps("at", max_out_of_orderness_ms=0).key_by("user")
    windows = keyed.window(hf.Tumbling(minutes=1)).aggregate(n=hf.count(), late=hf.mean("delay")).uid("windows")
    windows.sink_to(hf.Blackhole()).uid("out")
    aggregates = (hf.ColumnAggregate("count", None, "n"), hf.ColumnAggregate("mean", "delay", "late", pa.int64()))
    history = pa.table({"user": ["a", "a"], "start": [60_000, 120_000], "n": [2, 3], "late.sum": [7, 9], "late.count": [2, 3]})
    hf.Savepoint.create(max_parallelism=128).with_state(
        "windows", hf.ColumnarStateDescriptor("windows", aggregates), history, key="user", namespace="start"
    ).with_operator_state("rows", hf.OperatorListStateDescriptor("positions"), []).write(tmp_path / "savepoint")
    report = env.preflight(tmp_path / "savepoint")
    assert (report.fits, report.notes) == (True, ())


def test_several_key_columns_are_a_tuple(tmp_path: Path) -> None:
    frame = pa.table({"carrier": ["AA", "AA"], "day": [1, 2], "value": [5, 6]})
    made = hf.Savepoint.create(max_parallelism=8).with_state("t", COUNT, frame, key=["carrier", "day"]).write(tmp_path / "a")
    assert made.states("t")["count"].key_type == "tuple<utf8,int64>"
    assert [(row["key_0"], row["key_1"], row["value"]) for row in made.rows("t", "count")] in (
        [("AA", 1, 5), ("AA", 2, 6)],
        [("AA", 2, 6), ("AA", 1, 5)],
    )
    with pytest.raises(InvalidConfigError, match="keys of utf8 from 2 columns"):
        hf.Savepoint.create(max_parallelism=8).with_state("t", COUNT, frame, key=["carrier", "day"], key_type=str)


def test_an_empty_state_needs_its_key_type(tmp_path: Path) -> None:
    empty = pa.RecordBatchReader.from_batches(pa.schema({"key": pa.string(), "value": pa.int64()}), [])
    with pytest.raises(InvalidConfigError, match="state 'count': of which type are its keys"):
        hf.Savepoint.create(max_parallelism=8).with_state("t", COUNT, empty).write(tmp_path / "a")
    made = hf.Savepoint.create(max_parallelism=8).with_state("t", COUNT, empty, key_type=str).write(tmp_path / "a")
    assert list(made.rows("t", "count")) == []


@dataclass
class Case:
    make: Callable[[hf.Savepoint], hf.Savepoint]
    kind: type[HoldfastError]
    match: str


def frame(**columns: Any) -> pa.Table:
    return pa.table(columns)


CASES = {
    "a null key": Case(
        lambda s: s.with_state("t", COUNT, frame(key=["a", None], value=[1, 2])),
        InvalidKeyError,
        "operator 't', state 'count', row 1: column 'key' is null",
    ),
    "a key twice": Case(
        lambda s: s.with_state("t", COUNT, frame(key=["a", "a"], value=[1, 2])), InvalidKeyError, "two rows have {'key': 'a'"
    ),
    "a value of another type": Case(
        lambda s: s.with_state("t", COUNT, frame(key=["a"], value=["1"])), StateValueError, "row 0: column 'value' is string"
    ),
    "a key that no key can be": Case(
        lambda s: s.with_state("t", COUNT, frame(key=[[1]], value=[1])), InvalidConfigError, "of which type are its keys"
    ),
    "no such column": Case(
        lambda s: s.with_state("t", COUNT, frame(user=["a"], value=[1])), InvalidConfigError, "no column 'key' in the frame"
    ),
    "a record without its field": Case(
        lambda s: s.with_state("t", LAST, frame(key=["a"], value=[{"other": 1}])), StateValueError, "state 'last', row 0"
    ),
    "a state twice": Case(
        lambda s: s.with_state("t", COUNT, FRAME, key="user", value="total").with_state("t", COUNT, frame(key=["a"], value=[1])),
        InvalidConfigError,
        "state 'count' is given twice",
    ),
    "two key types": Case(
        lambda s: s.with_state("t", COUNT, frame(key=["a"], value=[1])).with_state("t", SEEN, frame(key=[1], value=["x"])),
        InvalidConfigError,
        "its states have keys of int64 and utf8",
    ),
    "operator state": Case(
        lambda s: s.with_state("t", OperatorListStateDescriptor("offsets"), frame(key=["a"], value=[1])),
        InvalidConfigError,
        "operator_list is not keyed state: give its entries by with_operator_state",
    ),
    "a uid that is no text": Case(
        lambda s: s.with_state("\ud800", COUNT, FRAME, key="user", value="total"), InvalidConfigError, "uid must be text"
    ),
    "a state whose name is no text": Case(
        lambda s: s.with_state("t", hf.ValueStateDescriptor("\ud800", int), FRAME, key="user", value="total"),
        InvalidConfigError,
        "must be text, and not empty",
    ),
    "a state without a name": Case(
        lambda s: s.with_operator_state("t", hf.OperatorListStateDescriptor(""), [b"x"]),
        InvalidConfigError,
        "must be text, and not empty",
    ),
    "no frame": Case(lambda s: s.with_state("t", COUNT, [1]), InvalidConfigError, "list is no table or DataFrame"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_no_state_can_have_is_refused_and_nothing_is_left(tmp_path: Path, case: Case) -> None:
    with pytest.raises(case.kind, match=case.match):
        case.make(hf.Savepoint.create(max_parallelism=8)).write(tmp_path / "savepoint")
    assert files_below(tmp_path) == {}


@pytest.mark.parametrize(("max_parallelism", "parallelism"), [(0, 1), (1 << 16, 1), (4, 5), (4, 0), (8.0, 1), ("8", 1), (8, None)])
def test_wrong_parallelism(max_parallelism: Any, parallelism: Any) -> None:
    with pytest.raises(InvalidConfigError):
        hf.Savepoint.create(max_parallelism=max_parallelism, parallelism=parallelism)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    history().write(tmp_path / "savepoint")
    with pytest.raises(InvalidConfigError, match="holds a snapshot"):
        history().write(tmp_path / "savepoint")


def test_values_that_expire_have_the_stamp_that_is_given_or_now(tmp_path: Path) -> None:
    ttl = hf.Ttl(timedelta(hours=1))
    count, seen = hf.ValueStateDescriptor("count", int, ttl=ttl), hf.ListStateDescriptor("seen", str, ttl=ttl)
    rows = frame(key=["a", "b"], value=[1, 2], at=[1_000, 2_000])
    began = int(time.time() * 1_000)
    made = (
        hf.Savepoint.create(max_parallelism=8)
        .with_state("t", count, rows, stamp="at")
        .with_state("t", seen, frame(key=["a"], value=["x"]))
        .write(tmp_path / "savepoint")
    )
    assert made.states("t")["count"].value_type == "ttl<int>"
    assert {(row["key"], row["value"], row["ttl_stamp_ms"]) for row in made.rows("t", "count")} == {
        ("a", 1, 1_000),
        ("b", 2, 2_000),
    }
    (element,) = made.rows("t", "seen")
    assert began <= element["ttl_stamp_ms"] <= int(time.time() * 1_000)
    edited = made.edit(tmp_path / "edited", uid="t", state="count", function=lambda batch: batch.slice(0, 1))
    (left,) = edited.rows("t", "count")
    assert left in list(made.rows("t", "count"))
    stamped = made.edit(tmp_path / "stamped", {("t", "count"): frame(key=["c"], value=[3])})
    (new,) = stamped.rows("t", "count")
    assert began <= new["ttl_stamp_ms"] <= int(time.time() * 1_000)
    with pytest.raises(StateValueError, match="row 0: column 'ttl_stamp_ms' is null"):
        made.edit(tmp_path / "wrong", {("t", "count"): frame(key=["c"], value=[3], ttl_stamp_ms=pa.nulls(1, pa.int64()))})
    with pytest.raises(InvalidConfigError, match="column 'ttl_stamp_ms' is not its own"):
        hf.Savepoint.create(max_parallelism=8).with_state("t", COUNT, rows, stamp="at").write(tmp_path / "none")

"""State with TTL: what is declared, stored and shown; what turning it on and off does; how much cleaning up does at once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pandas as pd
import pyarrow as pa
import pytest

from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.errors import CorruptStateError, IncompatibleStateError, InvalidConfigError, InvariantError
from holdfast.statebackends.factory import BACKEND_KINDS, BackendKind, create_keyed_backend
from holdfast.statebackends.handles import KeyGroupRange, StateMeta
from holdfast.statebackends.layout import TTL_STAMP
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import StateSerializer, check_compatible, has_stamps, state_meta
from holdfast.statebackends.serialization.type_serializer import Compatibility, TypeSerializer
from holdfast.statebackends.snapshot.parts import read_part
from holdfast.statebackends.snapshot.rows import unexpired_rows
from holdfast.statebackends.snapshot.table_file import decode_keyed_table
from holdfast.statebackends.snapshot.tables import encode_keyed_table
from holdfast.statebackends.state import (
    DURATION_MS_MAX,
    AggregatingStateDescriptor,
    KeyedStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    Pickled,
    ReducingStateDescriptor,
    Ttl,
    ValueStateDescriptor,
    split_ttl_text,
    ttl_text,
)
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from holdfast.statebackends.state_processor.values import Comparer
from holdfast.statebackends.storage.port import run_flow
from tests.statebackends.backend_harness import KEY, Cluster, MeanAggregate, stored, use

HOUR_MS = 3_600_000
TTL = Ttl(timedelta(hours=1))


def declared(ttl: Ttl | None, number: type = int) -> list[KeyedStateDescriptor]:
    """One state of every kind."""
    return [
        ValueStateDescriptor("value", number, ttl),
        ListStateDescriptor("list", number, ttl),
        MapStateDescriptor("map", str, number, ttl),
        ReducingStateDescriptor("reducing", number, lambda old, added: old + added, ttl),
        AggregatingStateDescriptor("aggregating", tuple[number, number], MeanAggregate(), ttl),  # type: ignore[valid-type]
    ]


def fill(backend: KeyedBackendBase, states: list[KeyedStateDescriptor], key: str, number: int) -> None:
    use(backend, key)
    value, listed, mapped, reducing, aggregating = (backend.get_state(state) for state in states)
    value.update(number)
    listed.add_all([number, number + 1])
    mapped.put("x", number)
    reducing.add(number)
    aggregating.add(number)


def shown(backend: KeyedBackendBase, states: list[KeyedStateDescriptor], key: str) -> list[Any]:
    use(backend, key)
    value, listed, mapped, reducing, aggregating = (backend.get_state(state) for state in states)
    return [value.value(), listed.get(), dict(mapped.items()), reducing.get(), aggregating.get()]


NOTHING: list[Any] = [None, [], {}, None, None]


def full(number: float) -> list[Any]:
    return [number, [number, number + 1], {"x": number}, number, float(number)]


@pytest.fixture(params=BACKEND_KINDS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = Cluster(tmp_path, request.param)
    yield made
    made.close()


def tables(cluster: Cluster, snapshot: Any) -> dict[str, pa.Table]:
    """The tables of a canonical snapshot."""
    (handle,) = snapshot[0]
    found = {}
    for meta, part in zip(handle.states, handle.parts, strict=True):
        data: bytes = run_flow(read_part(part, snapshot[1]), cluster.storage)
        found[meta.name] = decode_keyed_table(data, handle.format, handle.key_groups)
    return found


# ------------------------------------------------------------------------------------------------------------ declaring


@pytest.mark.parametrize(
    "arguments",
    [
        {"duration": 0},
        {"duration": -1},
        {"duration": 2**63},
        {"duration": timedelta(microseconds=1500)},
        {"duration": 1.5},
        {"duration": True},
        {"duration": "1h"},
        {"duration": 1, "update": "always"},
        {"duration": 1, "visibility": "sometimes"},
        {"duration": 1, "cleanup_entries": -1},
        {"duration": 1, "cleanup_entries": 1001},
        {"duration": 1, "cleanup_entries": True},
    ],
)
def test_settings_out_of_bounds_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError):
        Ttl(**arguments)


def test_a_duration_is_no_ttl() -> None:
    with pytest.raises(InvalidConfigError, match="'count'"):
        state_meta(ValueStateDescriptor("count", int, timedelta(hours=1)), KEY)  # type: ignore[call-overload]


def test_the_stored_type_says_that_there_are_stamps() -> None:
    texts = {state.name: state_meta(state, KEY).value_type for state in declared(TTL)}
    assert texts == {
        "value": "ttl<int>",
        "list": "ttl<int>",
        "map": "map<str,ttl<int>>",
        "reducing": "ttl<int>",
        "aggregating": "ttl<tuple<int,int>>",
    }
    assert split_ttl_text(ttl_text("dict<str,int>")) == ("dict<str,int>", True)
    assert split_ttl_text("dict<str,int>") == ("dict<str,int>", False)
    assert state_meta(ValueStateDescriptor("p", Pickled, TTL), KEY).value_type == "ttl<pickled>"
    with pytest.raises(InvalidConfigError):
        TypeSerializer.parse("ttl<int>")  # what an older reader does: it refuses the state, and misreads nothing


def test_a_backend_with_a_ttl_needs_the_time(tmp_path: Path) -> None:
    with pytest.raises(InvariantError):
        create_keyed_backend(
            "memory",
            descriptors=declared(TTL),
            key_type=KeyType.of(str),
            key_groups=KeyGroupRange(0, 1),
            max_parallelism=1,
            operator="op",
            subtask=0,
            local_dir="",
        )


# ------------------------------------------------------------------------------------------------- stored stamps decide


@pytest.mark.parametrize("canonical", [False, True])
def test_after_a_long_downtime_the_stored_stamps_decide(cluster: Cluster, canonical: bool) -> None:
    """R23."""
    states = declared(TTL)
    backend = cluster.backend(states)
    fill(backend, states, "old", 1)
    cluster.now_ms += HOUR_MS // 2
    backend.set_processing_time(cluster.now_ms)
    fill(backend, states, "new", 2)
    snapshot = cluster.take(backend, canonical=canonical)
    cluster.now_ms += HOUR_MS // 2 - 1
    restored = cluster.restored(snapshot, states)
    assert shown(restored, states, "old") == full(1)
    cluster.now_ms += 1
    restored = cluster.restored(snapshot, states)
    assert shown(restored, states, "old") == NOTHING
    assert shown(restored, states, "new") == full(2)
    cluster.now_ms += HOUR_MS // 2
    assert shown(cluster.restored(snapshot, states), states, "new") == NOTHING


@pytest.mark.parametrize("canonical", [False, True])
def test_the_longest_duration_is_one(cluster: Cluster, canonical: bool) -> None:
    states = declared(Ttl(DURATION_MS_MAX))
    backend = cluster.backend(states)
    fill(backend, states, "old", 1)
    snapshot = cluster.take(backend, canonical=canonical)
    cluster.now_ms += 100 * 365 * 24 * HOUR_MS
    assert shown(cluster.restored(snapshot, states), states, "old") == full(1)


@pytest.mark.parametrize("canonical", [False, True])
def test_a_snapshot_has_what_expires_in_the_next_millisecond(cluster: Cluster, canonical: bool) -> None:
    states = declared(TTL)
    backend = cluster.backend(states)
    fill(backend, states, "a", 1)
    cluster.now_ms += HOUR_MS - 1
    backend.set_processing_time(cluster.now_ms)
    snapshot = cluster.take(backend, canonical=canonical)
    assert shown(cluster.restored(snapshot, states), states, "a") == full(1)


def test_a_list_keeps_the_elements_that_have_not_expired(cluster: Cluster) -> None:
    state = ListStateDescriptor("list", int, Ttl(1000))
    backend = cluster.backend([state])
    use(backend, "a")
    for step in range(4):
        backend.set_processing_time(cluster.now_ms + 400 * step)
        backend.get_state(state).add(step)
        cluster.take(backend)
    cluster.now_ms += 400 * 3
    for later, kept in ((0, [1, 2, 3]), (200, [2, 3]), (600, [3]), (1000, [])):
        backend.set_processing_time(cluster.now_ms + later)
        snapshot = cluster.take(backend)  # nobody reads it here, but every cleanup looks at it
        restored = cluster.restored(snapshot, [state])
        restored.set_processing_time(cluster.now_ms + later)
        use(restored, "a")
        assert restored.get_state(state).get() == kept


@pytest.mark.parametrize("reader", BACKEND_KINDS)
def test_every_backend_restores_a_savepoint_with_equal_stamps(cluster: Cluster, reader: BackendKind) -> None:
    states = declared(TTL)
    backend = cluster.backend(states)
    for number, key in enumerate("abcdefgh"):
        backend.set_processing_time(cluster.now_ms + number)
        fill(backend, states, key, number)
    before = tables(cluster, snapshot := cluster.take(backend, canonical=True))
    cluster.now_ms += 60_000
    after = tables(cluster, cluster.take(cluster.restored(snapshot, states, kind=reader), canonical=True))
    for name, table in before.items():
        order = [(field, "ascending") for field in table.column_names if field not in ("value", "namespace")]
        assert after[name].sort_by(order).equals(table.sort_by(order)), name
        assert set(table.column(TTL_STAMP).to_pylist()) == {cluster.now_ms - 60_000 + number for number in range(8)}


def test_what_has_expired_at_the_barrier_is_in_no_savepoint(cluster: Cluster) -> None:
    states = declared(Ttl(HOUR_MS, cleanup_entries=0))
    backend = cluster.backend(states)
    fill(backend, states, "old", 1)
    cluster.take(backend)  # with RocksDB, rows on disk
    backend.set_processing_time(cluster.now_ms + HOUR_MS - 1)
    fill(backend, states, "old", 1)
    use(backend, "old")
    backend.get_state(states[1]).add(9)
    fill(backend, states, "new", 2)
    backend.set_processing_time(cluster.now_ms + HOUR_MS)
    pending = backend.snapshot(7)
    backend.set_processing_time(cluster.now_ms + 9 * HOUR_MS)  # the barrier's time counts
    found = tables(cluster, cluster.finish(pending, canonical=True))
    rows = {name: sorted((row["key"], row["value"]) for row in table.to_pylist()) for name, table in found.items()}
    assert rows["value"] == [("new", 2), ("old", 1)]
    assert rows["list"] == [("new", 2), ("new", 3), ("old", 1), ("old", 2), ("old", 9)]
    assert [row["position"] for row in found["list"].to_pylist() if row["key"] == "old"] == [0, 1, 2]
    assert rows["map"] == [("new", 2), ("old", 1)]


def test_a_savepoint_reads_as_before_with_other_tools(cluster: Cluster, tmp_path: Path) -> None:
    states = declared(TTL)[:3]
    backend = cluster.backend(states)
    use(backend, "a")
    backend.get_state(states[0]).update(5)
    backend.get_state(states[2]).put("x", 6)
    handles, folder = cluster.finish(backend.snapshot(1), canonical=True, inline_threshold=0)
    parts = zip(handles[0].states, handles[0].parts, strict=True)
    paths = {meta.name: str(tmp_path / "state" / folder / part.path) for meta, part in parts}  # type: ignore[union-attr]
    assert duckdb.sql(f"SELECT key, value FROM '{paths['value']}'").fetchall() == [("a", 5)]
    assert duckdb.sql(f"SELECT make_timestamp(ttl_stamp_ms * 1000) IS NOT NULL FROM '{paths['map']}'").fetchall() == [(True,)]
    frame = pd.read_parquet(paths["map"])
    assert frame[["key", "map_key", "value", "ttl_stamp_ms"]].values.tolist() == [["a", "x", 6, cluster.now_ms]]


# ------------------------------------------------------------------------------------------------------- turning it on, off


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_turned_on_what_is_restored_was_written_at_the_restore(cluster: Cluster, canonical: bool, parallelism: int) -> None:
    old, new = declared(None), declared(TTL, float)  # with another, wider type at the same time
    backend = cluster.backend(old)
    fill(backend, old, "a", 1)
    snapshot = cluster.take(backend, canonical=canonical)
    cluster.now_ms += 100 * HOUR_MS
    subtask = KEY.key_group("a", 16) * parallelism // 16
    restored = cluster.restored(snapshot, new, parallelism=parallelism, subtask=subtask)
    again = cluster.take(restored, canonical=canonical)
    assert shown(restored, new, "a") == full(1.0)
    restored.set_processing_time(cluster.now_ms + HOUR_MS - 1)
    assert shown(restored, new, "a") == full(1.0)
    restored.set_processing_time(cluster.now_ms + HOUR_MS)
    assert shown(restored, new, "a") == NOTHING
    cluster.now_ms += HOUR_MS  # what was stored again keeps the stamps of the first restore
    assert shown(cluster.restored(again, new, parallelism=parallelism, subtask=subtask), new, "a") == NOTHING


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_turned_off_the_stamps_are_dropped(cluster: Cluster, canonical: bool, parallelism: int) -> None:
    old, new = declared(TTL), declared(None, float)
    backend = cluster.backend(old)
    fill(backend, old, "a", 1)
    snapshot = cluster.take(backend, canonical=canonical)
    cluster.now_ms += 100 * HOUR_MS
    subtask = KEY.key_group("a", 16) * parallelism // 16
    restored = cluster.restored(snapshot, new, parallelism=parallelism, subtask=subtask)
    assert shown(restored, new, "a") == full(1.0)
    snapshot = cluster.take(restored, canonical=True)
    assert all(TTL_STAMP not in table.column_names for table in tables(cluster, snapshot).values())
    assert shown(cluster.restored(snapshot, new), new, "a") == full(1.0)


def test_pickled_values_are_not_unpickled_to_get_or_lose_a_stamp(cluster: Cluster) -> None:
    def state(ttl: Ttl | None) -> ValueStateDescriptor:
        return ValueStateDescriptor("v", Pickled, ttl)

    backend = cluster.backend([state(None)])
    use(backend, "a")
    backend.get_state(state(None)).update({"any": 1})
    restored = cluster.restored(cluster.take(backend), [state(TTL)])
    use(restored, "a")
    assert restored.get_state(state(TTL)).value() == {"any": 1}
    restored = cluster.restored(cluster.take(restored), [state(None)])
    use(restored, "a")
    assert restored.get_state(state(None)).value() == {"any": 1}


def test_verdicts_tell_a_change_of_ttl_from_a_change_of_type() -> None:
    def verdict(old: KeyedStateDescriptor, new: KeyedStateDescriptor) -> Compatibility:
        return check_compatible(state_meta(old, KEY), state_meta(new, KEY), operator="op")

    for plain, stamped, wider in zip(declared(None), declared(TTL), declared(TTL, float), strict=True):
        assert verdict(plain, plain) is verdict(stamped, stamped) is Compatibility.COMPATIBLE_AS_IS
        for old, new in ((plain, stamped), (stamped, plain), (plain, wider), (stamped, wider)):
            assert verdict(old, new) is Compatibility.COMPATIBLE_AFTER_MIGRATION
        for old, new in ((wider, plain), (wider, stamped)):
            with pytest.raises(IncompatibleStateError, match=r"ttl<.*float") as raised:
                verdict(old, new)
            assert "ttl<" in raised.value.fields["stored"]
    longer = ValueStateDescriptor("value", int, Ttl(timedelta(days=9), "read", "until_cleaned"))
    assert verdict(declared(TTL)[0], longer) is Compatibility.COMPATIBLE_AS_IS
    with pytest.raises(IncompatibleStateError):
        verdict(MapStateDescriptor("m", str, int, TTL), MapStateDescriptor("m", int, int, TTL))
    with pytest.raises(IncompatibleStateError):
        check_compatible(StateMeta("m", "map", "int", KEY.text), state_meta(MapStateDescriptor("m", str, int), KEY), operator="op")


# ---------------------------------------------------------------------------------------------------------- damaged stamps


def test_a_table_with_damaged_stamps_is_corrupt(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "filesystem")
    states = declared(TTL)[:1]
    backend = cluster.backend(states)
    use(backend, "a")
    backend.get_state(states[0]).update(1)
    snapshot = cluster.finish(backend.snapshot(1), canonical=True, inline_threshold=1 << 20)
    ((handle,), folder), table = snapshot, tables(cluster, snapshot)["value"]
    place = table.schema.get_field_index(TTL_STAMP)
    damaged = [
        table.remove_column(place),
        table.set_column(place, TTL_STAMP, pa.array([None], pa.int64())),
        table.set_column(place, TTL_STAMP, pa.array([1.5])),
        table.set_column(place, TTL_STAMP, pa.array(["now"])),
    ]
    for each in damaged:
        data = encode_keyed_table(each.replace_schema_metadata(table.schema.metadata), "parquet").to_pybytes()
        broken = msgspec.structs.replace(handle, parts=(msgspec.structs.replace(handle.parts[0], data=data),))
        with pytest.raises(CorruptStateError, match="'op'") as raised:
            cluster.restored(((broken,), folder), states)
        assert raised.value.fields["operator"] == "op"
    assert unexpired_rows(table.slice(0, 0), 0).num_rows == 0
    cluster.close()


def test_bytes_too_short_for_a_stamp_are_corrupt() -> None:
    for state in declared(TTL)[:2]:
        serializer = StateSerializer.of(state, KEY)
        whole = serializer.encode([(5, 1)] if serializer.kind == "list" else (5, 1))
        assert serializer.decode(whole) == ([(5, 1)] if serializer.kind == "list" else (5, 1))
        for stop in range(len(whole)):
            with pytest.raises(CorruptStateError):
                serializer.decode(whole[:stop])


# ------------------------------------------------------------------------------------------------------------- cleaning up


@pytest.mark.parametrize("kind", range(5))
def test_state_in_memory_that_nobody_reads_again_is_cleaned_up_a_few_values_an_access(tmp_path: Path, kind: int) -> None:
    cluster = Cluster(tmp_path, "memory")
    state = declared(Ttl(1000, cleanup_entries=3))[kind]
    backend = cluster.backend([state])
    write = {"value": "update", "map": "put"}.get(state.kind, "add")
    for number in range(300):
        use(backend, f"k{number}")
        getattr(backend.get_state(state), write)(*(["x", number] if state.kind == "map" else [number]))
    backend.set_processing_time(cluster.now_ms + 1248)  # the slice that they were written in has not expired wholly
    use(backend, "other")
    backend.get_state(state).clear()
    assert len(list(backend.keys(state.name))) == 300
    backend.set_processing_time(cluster.now_ms + 1249)
    for accesses in range(1, 101):
        backend.get_state(state).clear()
        assert len(list(backend.keys(state.name))) == 300 - 3 * accesses
    assert not list(backend.keys(state.name))
    cluster.close()


def test_a_value_that_was_stamped_again_stays(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory")
    states = declared(Ttl(1000))
    backend = cluster.backend(states)
    for step in range(40):
        backend.set_processing_time(cluster.now_ms + 300 * step)
        fill(backend, states, "kept", step)
        fill(backend, states, f"left-{step}", step)
    assert set(map(KEY.decode, backend.keys("value"))) == {"kept", *(f"left-{step}" for step in range(35, 40))}
    use(backend, "kept")
    assert [backend.get_state(state).get() for state in (states[3],)] == [sum(range(40))]
    assert backend.get_state(states[1]).get() == [value for step in range(36, 40) for value in (step, step + 1)]
    cluster.close()


def test_namespaces_are_cleaned_up_by_accesses_to_any_of_them(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory")
    state = ValueStateDescriptor("v", int, Ttl(1000))
    backend = cluster.backend([state])
    use(backend, "a")
    for window in range(20):
        backend.get_state(state, b"%d" % window).update(1)
    cluster.take(backend)
    backend.set_processing_time(cluster.now_ms + 5000)
    for _ in range(4):
        backend.get_state(state).value()
    assert not any(list(backend.keys("v", b"%d" % window)) for window in range(20))
    cluster.take(backend)
    assert not backend._state_tables
    assert not backend._table_ttls
    cluster.close()


def test_restored_state_is_cleaned_up_too(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "filesystem")
    states = declared(Ttl(1000))
    backend = cluster.backend(states)
    for number in range(10):
        fill(backend, states, f"k{number}", number)
    snapshot = cluster.take(backend)
    cluster.now_ms += 500
    restored = cluster.restored(snapshot, states)
    assert len(list(restored.keys("map"))) == 10
    restored.set_processing_time(cluster.now_ms + 5000)
    use(restored, "other")
    for state in states:
        for _ in range(4):
            restored.get_state(state).clear()
        assert not list(restored.keys(state.name)), state
    expired = cluster.now_ms + 5000
    cluster.now_ms = expired
    assert not list(cluster.restored(snapshot, states).keys("value")), "what has expired is not even loaded"
    cluster.close()


def test_rocksdb_deletes_what_has_expired_behind_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.statebackends.rocksdb.write_buffer.CLEANUP_ROWS_MIN", 100)
    monkeypatch.setattr("holdfast.statebackends.rocksdb.write_buffer.CLEANUP_BATCH_ROWS", 7)
    cluster = Cluster(tmp_path, "rocksdb")
    unswept = ValueStateDescriptor("unswept", int, Ttl(1000, cleanup_entries=0))
    states = [*declared(Ttl(1000)), ValueStateDescriptor("forever", int), unswept]
    backend = cluster.backend(states)
    for number in range(100):
        fill(backend, states[:5], f"k{number}", number)
        backend.get_state(states[5]).update(number)
        backend.get_state(states[6]).update(number)
    cluster.take(backend)
    write_buffer: Any = backend.write_buffer  # type: ignore[attr-defined]

    def stored(name: str) -> int:
        return len(list(write_buffer.store.state_rows(write_buffer.store.state_id(name), backend.key_groups)))

    assert [stored(state.name) for state in states] == [100] * 7
    backend.set_processing_time(cluster.now_ms + 1000)
    fill(backend, states[:5], "k5", 5)
    deleted = []
    for _ in range(8):
        before = sum(stored(state.name) for state in states)
        cluster.take(backend)
        deleted.append(before - sum(stored(state.name) for state in states))
    assert all(count <= 110 for count in deleted), "a bounded number of rows behind each snapshot"
    assert [stored(state.name) for state in states] == [1, 1, 1, 1, 1, 100, 100]
    assert shown(backend, states[:5], "k5") == full(5)
    assert shown(backend, states[:5], "k6") == NOTHING
    assert shown(cluster.restored(cluster.take(backend), states), states[:5], "k5") == full(5)
    cluster.close()


def test_closing_the_database_ends_the_cleaning_up(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "rocksdb")
    states = declared(TTL)
    backend = cluster.backend(states)
    fill(backend, states, "a", 1)
    cluster.take(backend)
    write_buffer: Any = backend.write_buffer  # type: ignore[attr-defined]
    backend.dispose()
    write_buffer.clean_up()
    assert write_buffer.cleanup.deleted == 0
    cluster.close()


def test_a_read_that_counts_copies_a_frozen_value(cluster: Cluster) -> None:
    """The value in the snapshot must not change with the one that got a new stamp."""
    state = ValueStateDescriptor("v", list[int], Ttl(HOUR_MS, update="read"))
    backend = cluster.backend([state])
    use(backend, "a")
    backend.get_state(state).update([1])
    pending = backend.snapshot(1)
    backend.set_processing_time(cluster.now_ms + 5)
    backend.get_state(state).value().append(2)
    restored = cluster.restored(cluster.finish(pending), [state])
    use(restored, "a")
    assert restored.get_state(state).value() == [1]


def test_within_one_time_a_read_stamps_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory")
    state = ValueStateDescriptor("v", int, Ttl(1000, update="read"))
    backend: Any = cluster.backend([state])
    use(backend, "a")
    backend.get_state(state).update(1)
    stored = backend._slots["v"].pages[0]
    backend.set_processing_time(cluster.now_ms + 5)
    backend.get_state(state).value()
    first = stored[0]
    backend.get_state(state).value()
    assert stored[0] is first
    assert first == (cluster.now_ms + 5, 1)
    cluster.close()


def test_a_comparison_counts_stamps_and_orders_sets() -> None:
    meta = state_meta(ValueStateDescriptor("v", set[int], TTL), KEY)
    assert has_stamps(meta)
    comparer = Comparer(meta)
    one, two, later = comparer.encode([[[2, 1], [1, 2], [1, 2]], [5, 5, 6]])
    assert one == two != later


# ------------------------------------------------------------------------------------------------------------------- tools


def rows(snapshot: StoredSnapshot, name: str) -> list[dict[str, Any]]:
    state = snapshot.state("op", name)
    with snapshot.reader() as reader:
        schema = state_schema(reader, state)
        found = [row for batch in state_batches(reader, state, schema) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: (row["key"], row.get("position"), row.get("map_key")))


def test_tools_show_values_and_stamps_of_every_format(cluster: Cluster) -> None:
    states = declared(TTL)
    backend = cluster.backend(states)
    for number, key in enumerate("abc"):
        backend.set_processing_time(cluster.now_ms + number)
        fill(backend, states, key, number)
    checkpoint, savepoint = (stored(cluster, cluster.take(backend, canonical=canonical)) for canonical in (False, True))
    for state in states:
        assert rows(checkpoint, state.name) == rows(savepoint, state.name)
    shown_rows = [(row["key"], row["position"], row["value"], row[TTL_STAMP]) for row in rows(checkpoint, "list")]
    now = cluster.now_ms
    assert shown_rows == [(key, at, n + at, now + n) for n, key in enumerate("abc") for at in (0, 1)]
    assert diff_snapshots(checkpoint, savepoint).is_same
    backend.set_processing_time(now + 9)
    fill(backend, states, "c", 2)
    later = stored(cluster, cluster.take(backend, canonical=True))
    changed = {found.state: (found.changed, found.same) for found in diff_snapshots(checkpoint, later, keys_max=9).states}
    assert changed == dict.fromkeys(["value", "list", "map", "reducing", "aggregating"], (1, 2)), "a new stamp is a change"


def test_a_job_whose_state_got_a_ttl_migrates_in_preflight_terms(cluster: Cluster) -> None:
    backend = cluster.backend(declared(None))
    fill(backend, declared(None), "a", 1)
    before = stored(cluster, cluster.take(backend))
    fill(restored := cluster.restored(cluster.take(backend), declared(TTL)), declared(TTL), "a", 1)
    after = stored(cluster, cluster.take(restored))
    for found in diff_snapshots(before, after).states:
        assert found.before is not None
        assert found.after is not None
        assert "ttl<" not in found.before.value_type
        assert "ttl<" in found.after.value_type
